"""`inspect` and `verify` of checkpoints that stock Orbax has written."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

ARRAYS = {"a": np.arange(24, dtype=np.float32).reshape(8, 3), "b": {"c": np.ones(5, np.int8)}, "step": 7}


@pytest.fixture(params=[True, False], ids=["ocdbt", "files"])
def saved(request, tmp_path):
    """A step of one item."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=request.param)
    ocp.Checkpointer(handler).save(tmp_path / "0" / "items", ARRAYS)
    return tmp_path / "0"


@pytest.fixture
def several(tmp_path, mesh):
    """A step of two items and something else."""
    sharded = jax.device_put(ARRAYS["a"], NamedSharding(mesh, PartitionSpec(("x", "y"))))
    args = {
        "state": ocp.args.PyTreeSave({"a": sharded}),
        "ema": ocp.args.PyTreeSave({"a": ARRAYS["a"], "name": "text"}),
        "config": ocp.args.JsonSave({"x": 1}),
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "5", args=ocp.args.Composite(**args))
    return tmp_path


def damage(path):
    """Takes the metadata of an array away, or the database that has them all; returns how the fault begins."""
    file = next(iter([*path.rglob("manifest.ocdbt"), *path.rglob("a/.zarray")]))
    file.unlink()
    return f"{file}: " if file.name == "manifest.ocdbt" else f"{file.parent.parent}: 'a': "


def test_arrays_are_listed(cli, saved):
    result = cli("inspect", saved)
    assert (result.status, result.err) == (0, "")
    table = result.blocks[0]
    assert table[0] == ["name", "kind", "dtype", "shape", "bytes", "chunk", "chunks"]
    assert table[1:] == [
        ["a", "np.ndarray", "float32", "[8,3]", "96", "[8,3]", "1"],
        ["b.c", "np.ndarray", "int8", "[5]", "5", "[5]", "1"],
        ["step", "scalar", "int64", "[]", "8", "[]", "1"],
    ]
    assert (result.facts["arrays"], result.facts["bytes"]) == ("3", "109")


def test_items_are_told_apart(cli, several):
    found = json.loads(cli("inspect", several, "--json").out)
    assert (found["path"], found["items"]) == (str(several / "5"), ["ema", "state"])
    chunks = {array["name"]: (array["kind"], array["chunk_shape"], array["chunks"]) for array in found["arrays"]}
    assert chunks == {"ema/a": ("np.ndarray", [8, 3], 1), "state/a": ("jax.Array", [1, 3], 8)}
    assert found["totals"] == {"arrays": 2, "parameters": 48, "bytes": 192}
    assert found["dtypes"] == {"float32": {"arrays": 2, "parameters": 48, "bytes": 192}}
    assert found["file_bytes"] > 192


def test_all_commands_print_one_path_of_an_item(cli, saved, tmp_path):
    """Every command takes it, and Orbax restores it."""
    for path in (tmp_path, saved, saved / "items"):
        assert json.loads(cli("inspect", path, "--json").out)["path"] == str(saved / "items")
        assert json.loads(cli("plan", path, "--mesh", "x=2", "--json").out)["path"] == str(saved / "items")
        assert cli("verify", path).out.startswith(f"{saved / 'items'}: OK")
    made = json.loads(cli("reshard", saved, tmp_path / "to", "--json").out)["path"]
    assert json.loads(cli("inspect", made, "--json").out)["path"] == made
    assert ocp.PyTreeCheckpointer().restore(made).keys() == ARRAYS.keys()


def test_a_family_is_for_safetensors(cli, saved):
    result = cli("inspect", saved, "--family", "maxtext")
    assert result.status == 2
    assert "--family is for safetensors, and PATH is a checkpoint of Orbax" in result.err


def test_a_sound_checkpoint(cli, saved, several):
    for path in (saved, saved / "items"):
        result = cli("verify", path)
        assert (result.status, result.err) == (0, "")
        assert result.out == f"{saved / 'items'}: OK, 3 Orbax arrays in 1 item\n"
    assert cli("verify", several).out == f"{several / '5'}: OK, 2 Orbax arrays in 2 items\n"


def test_an_array_that_does_not_open(cli, saved):
    fault = damage(saved)
    result = cli("verify", saved)
    assert (result.status, result.err) == (1, "")
    assert result.out.startswith(fault)


def test_every_fault_has_a_line(cli, several):
    faults = [damage(several / "5" / item) for item in ("ema", "state")]
    lines = cli("verify", several).out.splitlines()
    assert len(lines) == len(faults)
    assert all(line.startswith(fault) for line, fault in zip(lines, faults, strict=True))


def test_a_tree_that_is_not_what_orbax_writes(cli, saved):
    (saved / "items" / "_METADATA").write_text("{}")
    result = cli("verify", saved)
    assert (result.status, result.err) == (1, "")
    assert "_METADATA: is not what Orbax writes" in result.out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_was_never_finished(cli, saved, command):
    unfinished = saved.rename(saved.parent / "0.orbax-checkpoint-tmp-1")
    result = cli(command, unfinished)
    assert (result.status, result.out) == (1, "")
    assert "was never finished" in result.err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_directory_of_neither(cli, tmp_path, command):
    result = cli(command, tmp_path)
    assert (result.status, result.out) == (1, "")
    assert result.err == f"error: {tmp_path}: holds no finished checkpoint of Orbax, and no .safetensors file\n"
