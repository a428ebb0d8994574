"""`link` as a command: what it prints, plans and refuses."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.roots import TESTDATA

DATA = TESTDATA / "maxtext"
GEMMA = DATA / "gemma3" / "hf"
QWEN = DATA / "qwen3" / "hf"
FAMILY = ["--family", "maxtext"]

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def test_a_link_is_a_checkpoint_of_orbax(cli, tmp_path):
    done = cli("link", QWEN, tmp_path / "to", *FAMILY)
    assert done.status == 0
    assert done.facts["path"] == str(tmp_path / "to")
    assert done.facts["computed"] == "0"
    assert done.facts["family"] == "maxtext.qwen3 scan_layers=true param_scan_axis=1"
    tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(tmp_path / "to")
    own = {
        jax.tree_util.keystr(path, simple=True, separator="-"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree["params"])
    }
    with np.load(DATA / "qwen3" / "mt_scanned.npz") as expected:
        assert sorted(own) == sorted(expected)
        assert all(own[name].tobytes() == expected[name].tobytes() for name in expected)


def test_json(cli, tmp_path):
    done = json.loads(cli("link", GEMMA, tmp_path / "to", *FAMILY, "--json").out)
    assert done["path"] == str(tmp_path / "to")
    assert done["linked_bytes"] > done["made_bytes"] > 0
    assert done["processes"] == 1


def test_a_plan_is_what_is_made_then(cli, tmp_path):
    asked = ["link", GEMMA, tmp_path / "to", *FAMILY]
    plan = json.loads(cli(*asked, "--plan", "--json").out)
    assert not (tmp_path / "to").exists()
    done = json.loads(cli(*asked, "--json").out)
    for figure in ("path", "linked_bytes", "made_bytes", "num_chunks"):
        assert plan[figure] == done[figure]
    assert len(plan["arrays"]) == done["num_arrays"]
    reasons = {array["name"]: array["made"] for array in plan["arrays"]}
    assert reasons["params.token_embedder.embedding"] == "its elements are computed (scale)"
    assert reasons["params.decoder.layers.layers_0.mlp.wo.kernel"] is None


def test_a_plan_with_a_mesh(cli, tmp_path):
    asked = ["link", GEMMA, tmp_path / "to", *FAMILY, "--plan", "--mesh", "fsdp=4", "--processes", "2"]
    whole = cli(*asked)
    inner = cli(*asked, "--spec", "wi_0.kernel=fsdp")
    assert whole.status == inner.status == 0
    assert whole.out.endswith("\nnothing was written\n")
    assert "Orbax reads whole chunks" not in whole.out
    assert "Orbax reads whole chunks" in inner.out
    headings, *rows = inner.blocks[1]
    assert headings == ["process", "needed", "read", "over-read", "chunks"]
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--processes", "2"], "--processes is for --plan"),
        (["--plan", "--resume"], "--resume is not for --plan"),
        (["--plan", "--hard-links"], "--hard-links is not for --plan"),
        (["--spec", "mlp=fsdp"], "--spec names the axes of a --mesh"),
        (["--memory", "many"], "--memory"),
    ],
)
def test_mistakes_in_the_command_line(cli, tmp_path, more, said):
    done = cli("link", QWEN, tmp_path / "to", *FAMILY, *more)
    assert done.status == 2
    assert said in done.err
    assert not (tmp_path / "to").exists()


def test_what_is_in_the_way(cli, tmp_path):
    (tmp_path / "to").mkdir()
    done = cli("link", QWEN, tmp_path / "to")
    assert done.status == 1
    assert done.err == f"error: {tmp_path / 'to'}: already exists; choose another destination\n"
