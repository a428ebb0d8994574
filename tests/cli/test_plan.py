"""`plan`: costs on meshes of devices that do not exist."""

import json

import pytest

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
    assert found["uneven_arrays"] == []
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
    facts, processes, files = result.blocks
    assert dict(facts)["mesh"] == "data=2,model=4"
    assert dict(facts)["devices"] == "8"
    assert dict(facts)["shards"] == "even"
    assert processes[0] == ["process", "needed", "read", "over-read", "requests", "staging", "destination"]
    assert [row[0] for row in processes[1:]] == ["0", "1", "2", "3"]
    assert files[0] == ["process", "file", "needed", "read", "over-read", "requests"]
    assert [row[:2] for row in files[1:]] == [[str(process), file] for process in range(4) for file in FILES]
    assert result.out.isascii()
    for row in processes[1:]:
        assert int(row[1]) == sum(int(own[2]) for own in files[1:] if own[0] == row[0])


def test_shards_that_do_not_divide(cli, single):
    result = cli("plan", single, "--mesh", "x=2", "--spec", "odd=x")
    assert result.status == 0
    assert result.facts["shards"] == "uneven"
    assert result.facts["most bytes per device"] != result.facts["fewest bytes per device"]
    assert result.err == (
        "warning: JAX has no arrays with shards of unequal size, so a restore is refused: 'odd' of shape (13,) by x\n"
    )
    assert plan(cli, single, "--mesh", "x=2", "--spec", "odd=x")["uneven_arrays"] == ["odd"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "data"], "argument --mesh: expected NAME=SIZE,..."),
        (["--mesh", "x=2", "--processes", "0"], "argument --processes: expected a positive number, found '0'"),
        (["--mesh", "x=4", "--processes", "3"], "4 devices cannot be dealt to 3 processes evenly"),
        (["--mesh", "x=2", "--spec", "x"], "argument --spec: expected REGEX=AXES"),
        (["--mesh", "x=2", "--spec", "(=x"], "argument --spec: '(' is not a regular expression"),
        (["--mesh", "x=2", "--spec", "kernel=y"], "the mesh has no axis 'y', it has x"),
        (["--mesh", "x=2", "--spec", "nothing=x"], "is not used: it matches no tensor"),
        (["--mesh", "x=2", "--spec", "0.bias=-,x"], "is for 2 dimensions, the tensor 'layer.0.bias' has 1: (48,)"),
    ],
)
def test_mistakes_are_status_2(cli, single, options, message):
    result = cli("plan", single, *options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
