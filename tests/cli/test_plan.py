"""`plan`: costs on meshes of devices that do not exist."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.checkpoint import from_config
from orbax_safetensors.cli.main import main
from tests.support.roots import TESTDATA
from tests.support.terminal import terminal

QWEN3 = TESTDATA / "qwen3"
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
# What half of the devices hold by default on a mesh of 2 x 4: half of all but the scalar and the vector of 13 bytes.
NEEDED = 64 * 48 * 4 // 2 + 48 * 4 // 2 + 8 + 2 * 3 * 16 * 2 // 2 + 13


def plan(cli, *argv):
    result = cli("plan", *argv, "--json")
    assert (result.status, result.err) == (0, "")
    return json.loads(result.out)


def test_json(cli, directory):
    found = plan(cli, directory, "--mesh", "data=2,model=4", "--processes", "2")
    assert found["path"] == str(directory)
    assert found["mesh"] == {"data": 2, "model": 4}
    assert found["num_arrays"] == 5
    assert found["total_params"] == 3230
    assert found["replicated_arrays"] == 2
    assert found["open_requests"] == 2 + len(FILES)  # with a listing and index
    assert found["largest_shard"] == found["smallest_shard"]
    for process in found["processes"]:
        assert process["needed_bytes"] == NEEDED
        assert process["read_bytes"] >= NEEDED
        assert process["over_read"] == process["read_bytes"] / NEEDED
        for key in ("needed_bytes", "read_bytes", "num_requests"):
            assert process[key] == sum(file[key] for file in process["files"])
        assert [file["file"] for file in process["files"]] == [str(directory / file) for file in FILES]


def test_one_process_needs_everything_once(cli, single):
    found = plan(cli, single, "--mesh", "x=4")
    (process,) = found["processes"]
    assert process["needed_bytes"] == process["read_bytes"] == 12693


def test_specs(cli, single):
    found = plan(cli, single, "--mesh", "x=2,y=2", "--processes", "2", "--spec", "0.kernel=-,x+y", "--spec", "bias=x")
    assert found["replicated_arrays"] == 3
    # Half of each row of the kernel, which short gaps make it read whole; half of the vector; the rest.
    rest = 8 + 2 * 3 * 16 * 2 + 13
    for process in found["processes"]:
        assert process["needed_bytes"] == 64 * 24 * 4 + 96 + rest
        assert process["read_bytes"] > 64 * 47 * 4


def test_a_pipe_gets_lines_of_fields(cli, directory):
    result = cli("plan", directory, "--mesh", "data=2,model=4", "--processes", "4", "--files")
    facts, processes, files, over_reads = result.blocks
    assert dict(facts)["mesh"] == "data=2,model=4"
    assert dict(facts)["devices"] == "8"
    assert dict(facts)["requests to open"] == str(2 + len(FILES))
    memory = ["memory for reading", "memory for arrays"]
    assert processes[0] == ["process", "needed", "read", "over-read", "requests", *memory]
    assert [row[0] for row in processes[1:]] == ["0", "1", "2", "3"]
    assert files[0] == ["process", "file", "needed", "read", "over-read", "requests"]
    assert [row[:2] for row in files[1:]] == [[str(process), file] for process in range(4) for file in FILES]
    assert over_reads[0] == ["leaf", "needed", "read", "over-read", "instead", "then"]
    assert result.out.isascii()
    for row in processes[1:]:
        assert int(row[1]) == sum(int(own[2]) for own in files[1:] if own[0] == row[0])


def test_arrays_that_a_spec_does_not_divide_stay_whole(cli, single):
    result = cli("plan", single, "--mesh", "x=2", "--spec", "odd|bias=x")
    assert result.status == 0
    assert result.facts["replicated arrays"] == "4"
    assert result.err == (
        "warning: spec: 'odd|bias': fits 1 of 2 arrays, and the others are left whole: 'odd' of shape (13,) (13 does "
        "not divide by 2)\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "data"], "argument --mesh: expected NAME=SIZE,..."),
        (["--mesh", "x=2", "--processes", "0"], "argument --processes: expected a positive number, found '0'"),
        (["--mesh", "x=4", "--processes", "3"], "4 devices cannot be dealt to 3 processes evenly"),
        (["--mesh", "x=4", "--mesh", "x=6", "--processes", "4"], "6 devices cannot be dealt to 4 processes evenly"),
        (["--mesh", "x=4", "--processes", "1", "--processes", "2"], "1 --mesh and 2 --processes"),
        (["--mesh", "x=4", "--mesh", "x=2", "--files"], "--files is for one --mesh"),
        (["--mesh", "x=4", "--mesh", "y=4", "--spec", "kernel=x"], "the mesh has no axis 'x', it has ['y']"),
        (["--mesh", "x=4", "--bandwidth", "2"], "argument --bandwidth: expected bytes per second"),
        (["--mesh", "x=4", "--bandwidth", "1GB/s", "--latency", "3"], "argument --latency: expected a time"),
        (["--mesh", "x=4", "--latency", "3ms"], "--latency is for an estimate of the time"),
        (["--mesh", "x=4", "--streams", "0"], "argument --streams: expected a positive number"),
        (["--mesh", "x=2", "--spec", "x"], "argument --spec: expected REGEX=AXES"),
        (["--mesh", "x=2", "--spec", "odd=x"], "'odd' of shape (13,), sharded as ('x',): 13 does not divide by 2"),
        (["--mesh", "x=2", "--spec", "nothing=x"], "--spec: 'nothing' is found in none of the"),
    ],
)
def test_mistakes_are_status_2(cli, single, options, message):
    result = cli("plan", single, *options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_a_family_is_planned_as_the_api_plans_it(cli):
    variant = {"scan_layers": False, "vocab_size": 128}
    switches = ["--variant", "scan_layers=false", "--variant", "vocab_size=128"]
    specs = ["--spec", r"layers_\d\.mlp=-,x", "--spec", "embedder=x"]
    found = plan(cli, QWEN3, "--family", "maxtext", *switches, "--mesh", "x=4", "--processes", "2", *specs)
    mesh = AbstractMesh((4,), ("x",))
    leaves = ost.open_checkpoint(QWEN3, family="maxtext.qwen3", variant=variant).leaves
    assert "params.decoder.layers_2.mlp.wo.kernel" in leaves
    target = {}
    for path, view in leaves.items():
        spec = (None, "x") if ".mlp." in path else ("x",) if "embedder" in path else ()
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        target[path] = jax.ShapeDtypeStruct(view.shape, view.dtype, sharding=sharding)
    wanted = ost.plan_restore(QWEN3, target, family="maxtext", variant=variant, process_count=2)
    for leaf in found["over_reads"]:
        del leaf["instead"]
    assert found.items() >= json.loads(wanted.to_json()).items()
    assert (found["family"], found["variant"]) == ("maxtext.qwen3", variant)
    assert found["num_arrays"] == len(leaves)
    assert found["replicated_arrays"] == len(leaves) - 10
    assert found["total_params"] == 34_624 + 64 * 32


@pytest.mark.parametrize("variant", ["scan_layers=true", "scan_layers=false"])
def test_without_a_spec_it_is_the_plan_of_a_load_over_the_mesh(cli, variant):
    hf = TESTDATA / "maxtext" / "qwen3" / "hf"
    found = plan(cli, hf, "--family", "maxtext", "--variant", variant, "--mesh", "data=2,model=4", "--processes", "4")
    switches = {"scan_layers": variant == "scan_layers=true"}
    mesh = AbstractMesh((2, 4), ("data", "model"))
    expected = json.loads(ost.plan_restore(hf, mesh, family="maxtext", variant=switches, process_count=4).to_json())
    assert {key: found[key] for key in ("processes", "largest_shard", "total_bytes")} == {
        key: expected[key] for key in ("processes", "largest_shard", "total_bytes")
    }
    kernels = ["--variant", variant, "--mesh", "all=8", "--processes", "4", "--spec", "mlp.*kernel$=all"]
    spread = plan(cli, hf, "--family", "maxtext", *kernels)
    assert sum(process["read_bytes"] for process in found["processes"]) < sum(
        process["read_bytes"] for process in spread["processes"]
    )


def test_a_family_in_a_pipe(cli):
    result = cli("plan", QWEN3, "--family", "maxtext", "--variant", "scan_layers=true", "--mesh", "x=2")
    assert (result.status, result.err) == (0, "")
    assert result.blocks[0][0] == ["family", "maxtext.qwen3 scan_layers=true"]
    assert result.facts["arrays"] == "13"
    assert "family" not in cli("plan", QWEN3, "--mesh", "x=2").facts
    assert "family" not in plan(cli, QWEN3, "--mesh", "x=2")


def test_a_spec_that_fits_no_leaf(cli):
    result = cli("plan", QWEN3, "--family", "maxtext", "--mesh", "x=2", "--spec", "self_attn=x")
    assert (result.status, result.out) == (2, "")
    assert "--spec: 'self_attn' is found in none of the 13 names of arrays, such as 'params." in result.err


@pytest.fixture
def wide(tmp_path):
    """Twelve kinds of matrices in two layers each, with rows so short that half of them cannot be read alone."""
    kernels = {f"layer.{n}.{kind}.kernel": np.zeros((64, 16), np.float32) for n in range(2) for kind in "abcdefghijkl"}
    save_file(kernels | {"layer.0.a.big": np.zeros((256, 16), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


OVER_READ = ["--mesh", "x=2", "--processes", "2", "--spec", "kernel=-,x", "--spec", "big=-,x"]


def test_what_is_read_for_nothing(cli, wide):
    leaves = plan(cli, wide, *OVER_READ)["over_reads"]
    assert len(leaves) == 25
    assert leaves[0] == {
        "name": "layer.0.a.big",
        "needed_bytes": 256 * 16 * 4,
        "read_bytes": 2 * (256 * 16 * 4 - 32),  # both read all but the other's end of the first or last row
        "num_requests": 2,
        "over_read": pytest.approx(2, rel=0.01),
        "instead": [{"axes": "x,-", "needed_bytes": 256 * 16 * 4, "read_bytes": 256 * 16 * 4, "over_read": 1.0}],
    }
    processes, worst = cli("plan", wide, *OVER_READ).blocks[1:]
    assert len(processes) == 3
    assert worst[0] == ["leaf", "needed", "read", "over-read", "instead", "then"]
    assert [row[0] for row in worst[1:]] == [leaf["name"] for leaf in leaves]
    assert worst[1] == ["layer.0.a.big", "16384", "32704", "1.99609", "x,-", "1"]
    assert len(cli("plan", wide, "--mesh", "x=2", "--processes", "2").blocks) == 2
    assert plan(cli, wide, "--mesh", "x=2", "--processes", "2")["over_reads"] == []


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_has_the_worst_with_layers_as_one(monkeypatch, wide, columns):
    shown = terminal(monkeypatch, columns, "stdout")
    assert main(["plan", str(wide), *OVER_READ]) == 0
    lines = shown.lines
    assert max(map(len, lines)) <= columns
    heading = next(number for number, line in enumerate(lines) if line.startswith(" leaf"))
    rows = [line.split() for line in lines[heading + 2 :]]
    assert rows[0] == ["layer.0.a.big", "16.0", "KiB", "31.9", "KiB", "2.00", "x,-", "1.00"]
    assert rows[1] == ["layer.{0..1}.a.kernel", "8.0", "KiB", "15.9", "KiB", "1.98", "x,-", "1.00"]
    assert len(rows) == 12
    assert rows[-1][0] == "instead:"
    assert rows[-2] == ["and", "3", "more;", "--json", "has", "all"]


TIMED = ["--bandwidth", "1MB/s", "--latency", "10ms", "--streams", "2"]


def test_an_estimate_of_the_time(cli, single):
    found = plan(cli, single, "--mesh", "x=4", "--processes", "2", "--spec", "0.kernel$=x", *TIMED)
    estimate = found["estimate"]
    assert (estimate["bandwidth"], estimate["latency"], estimate["streams"]) == (1e6, 0.01, 2)
    for process, seconds in zip(found["processes"], estimate["processes"], strict=True):
        transfer, requests = process["read_bytes"] / 1e6, process["num_requests"]
        rounds = -(-requests // 2)
        assert max(transfer, rounds * 0.01) < seconds <= transfer + rounds * 0.01 + 1e-12
    assert estimate["seconds"] == max(estimate["processes"]) == estimate["processes"][estimate["slowest"]]
    assert "estimate" not in plan(cli, single, "--mesh", "x=4")
    result = cli("plan", single, "--mesh", "x=4", "--processes", "2", "--spec", "0.kernel$=x", *TIMED)
    facts, processes = result.blocks
    assert float(dict(facts)["estimated time"]) == pytest.approx(estimate["seconds"], rel=1e-5)
    assert dict(facts)["slowest process"] == str(estimate["slowest"])
    assert processes[0][-1] == "time"
    times = [float(row[-1]) for row in processes[1:]]
    assert times == pytest.approx(estimate["processes"], rel=1e-5)


def test_streams_are_threads(cli, wide):
    one, four = (plan(cli, wide, *OVER_READ, "--streams", n)["processes"][0]["staging_bytes"] for n in "14")
    assert four == 4 * one > 0


MESHES = ["--mesh", "x=4", "--mesh", "x=2,y=4", "--mesh", "y=2,x=1"]


def test_several_meshes_side_by_side(cli, directory):
    argv = [directory, "--processes", "2", "--spec", "0.kernel$=-,x", *TIMED]
    found = plan(cli, *argv, *MESHES)
    assert found.keys() == {"path", "meshes"}
    alone = [plan(cli, *argv, *MESHES[at : at + 2]) for at in range(0, 6, 2)]
    assert [one | {"path": str(directory)} for one in found["meshes"]] == alone
    facts, table = cli("plan", *argv, *MESHES).blocks
    assert dict(facts) == {"arrays": "5", "parameters": "3230", "bytes": "12689"}
    columns = ["mesh", "devices", "processes", "per device", "read", "over-read", "requests", "memory", "time"]
    assert table[0] == columns
    assert [row[:3] for row in table[1:]] == [["x=4", "4", "2"], ["x=2,y=4", "8", "2"], ["y=2,x=1", "2", "2"]]
    for row, one in zip(table[1:], alone, strict=True):
        costs = one["processes"]
        read, needed = (sum(cost[key] for cost in costs) for key in ("read_bytes", "needed_bytes"))
        assert [int(row[3]), int(row[4]), int(row[6]), int(row[7])] == [
            one["largest_shard"]["nbytes"],
            max(cost["read_bytes"] for cost in costs),
            max(cost["num_requests"] for cost in costs),
            max(cost["staging_bytes"] + cost["destination_bytes"] for cost in costs),
        ]
        assert float(row[5]) == pytest.approx(read / needed, rel=1e-5)
        assert float(row[8]) == pytest.approx(one["estimate"]["seconds"], rel=1e-5)


def test_processes_for_each_mesh_and_no_time(cli, single):
    result = cli("plan", single, *MESHES, "--processes", "4", "--processes", "8", "--processes", "1")
    table = result.blocks[1]
    assert [row[2] for row in table] == ["processes", "4", "8", "1"]
    assert table[0][-1] == "memory"


def test_a_family_on_several_meshes(cli):
    found = plan(cli, QWEN3, "--family", "maxtext", "--mesh", "x=2", "--mesh", "x=4")
    assert found["family"] == "maxtext.qwen3"
    assert [one["mesh"] for one in found["meshes"]] == [{"x": 2}, {"x": 4}]
    facts, _ = cli("plan", QWEN3, "--family", "maxtext", "--mesh", "x=2", "--mesh", "x=4").blocks
    assert facts[0] == ["family", "maxtext.qwen3"]


def test_a_checkpoint_is_opened_once(cli, single, monkeypatch):
    opened = []
    read_checkpoint = from_config.read_checkpoint
    monkeypatch.setattr(
        from_config,
        "read_checkpoint",
        lambda path, *more, **named: opened.append(path) or read_checkpoint(path, *more, **named),
    )
    assert cli("plan", single, *MESHES).status == 0
    assert opened == [str(single)]


def test_a_save(cli):
    argv = [QWEN3, "--family", "maxtext", "--mesh", "x=4", "--processes", "2", "--save"]
    found = plan(cli, *argv, *TIMED)
    assert (found["family"], found["variant"], found["mesh"]) == ("maxtext.qwen3", {}, {"x": 4})
    assert [file["file"] for file in found["files"]] == ["model.safetensors"]
    assert sum(process["written_bytes"] for process in found["processes"]) == 4 * 34_624
    assert found["estimate"]["seconds"] > 0
    facts, processes, files = cli("plan", *argv, *TIMED, "--files").blocks
    assert facts[0] == ["family", "maxtext.qwen3"]
    assert dict(facts)["files"] == "1"
    assert float(dict(facts)["estimated time"]) == pytest.approx(found["estimate"]["seconds"], rel=1e-5)
    assert processes[0] == ["process", "written", "requests", "files", "time"]
    for row, process in zip(processes[1:], found["processes"], strict=True):
        assert [int(cell) for cell in row[1:3]] == [process["written_bytes"], process["num_requests"]]
    assert [row[:2] for row in files] == [["process", "file"], ["0", "model.safetensors"], ["1", "model.safetensors"]]
    processes = cli("plan", *argv).blocks[1]
    assert processes[0][-1] == "files"


def test_a_save_is_of_one_mesh_and_has_no_picture(cli, single, tmp_path):
    for more, message in (
        (["--mesh", "x=2"], "--save is for one --mesh"),
        (["--picture", tmp_path / "a.html"], "--picture is of a restore, and --save asks for a save"),
    ):
        result = cli("plan", single, "--mesh", "x=4", "--save", *more)
        assert (result.status, result.out) == (2, "")
        assert message in result.err


ORBAX = TESTDATA / "orbax" / "deepseek3_scanned"
OF_ORBAX = [ORBAX, "--mesh", "x=2,y=2", "--processes", "2", "--spec", "layers.*kernel=x,-,y"]


def test_a_checkpoint_of_orbax(cli):
    found = plan(cli, *OF_ORBAX, "--bandwidth", "1MB/s")
    result = cli("plan", *OF_ORBAX, "--bandwidth", "1MB/s")
    assert (result.status, result.err) == (0, "")
    facts, processes, over_reads, advice = result.blocks
    facts = dict(facts)
    assert facts["path"] == found["path"] == str(ORBAX / "0" / "items")
    assert [facts["bytes"], facts["chunks"], facts["bytes of files"]] == [
        str(found[key]) for key in ("total_bytes", "total_chunks", "file_bytes")
    ]
    assert processes[0] == ["process", "needed", "read decoded", "over-read", "chunks", "time"]
    for row, cost in zip(processes[1:], found["processes"], strict=True):
        assert row[1:3] == [str(cost["needed_bytes"]), str(cost["read_bytes"])]
        assert float(row[5]) == pytest.approx(cost["read_bytes"] / 1e6, rel=1e-4)
    assert over_reads[0] == ["leaf", "needed", "read decoded", "over-read", "chunks", "chunk", "instead"]
    assert [row[0] for row in over_reads[1:]] == [leaf["name"] for leaf in found["over_reads"]]
    assert advice[-1] == [found["reshard"]]
    assert found["reshard"] == (
        f"orbax-safetensors reshard {ORBAX} DESTINATION --mesh x=2,y=2 --spec 'layers.*kernel=x,-,y'"
    )


def test_the_advice_ends_the_over_read(cli, tmp_path):
    assert cli("reshard", ORBAX, tmp_path, "--mesh", "x=2,y=2", "--spec", "layers.*kernel=x,-,y").status == 0
    found = plan(cli, tmp_path, *OF_ORBAX[1:])
    assert (found["over_reads"], found["reshard"]) == ([], None)
    assert all(cost["over_read"] == 1 for cost in found["processes"])
    assert len(cli("plan", tmp_path, *OF_ORBAX[1:]).blocks) == 2


def test_without_a_spec_axes_are_spread(cli):
    """And `reshard`, which leaves arrays whole without one, would not help."""
    found = plan(cli, ORBAX, "--mesh", "x=2")
    assert found["processes"][0]["needed_bytes"] == found["total_bytes"]
    found = plan(cli, ORBAX, "--mesh", "x=8", "--processes", "2")
    assert (bool(found["over_reads"]), found["reshard"]) == (True, None)
    advice = cli("plan", ORBAX, "--mesh", "x=8", "--processes", "2").blocks[-1]
    assert advice[-1][0].startswith("Plan with the --spec of your model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family", "maxtext"], "--family is for safetensors"),
        (["--save"], "--save is for safetensors"),
        (["--mesh", "x=4"], "is planned for one --mesh"),
        (["--spec", "nothing=x"], "--spec: 'nothing' is found in none of the"),
        (["--spec", "embedding=-,x"], "32 does not divide by 3"),
    ],
)
def test_mistakes_with_a_checkpoint_of_orbax(cli, options, message):
    result = cli("plan", ORBAX, "--mesh", "x=3", *options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
