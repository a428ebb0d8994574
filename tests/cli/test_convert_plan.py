"""`convert --plan` and `reshard --plan`."""

import json

import pytest

from tests.support.cli_conversions import HF, NBYTES, ORBAX, SMALL, TO_ORBAX

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def test_a_plan_of_a_conversion(cli, tmp_path):
    asked = [HF, tmp_path / "to", *TO_ORBAX, *SMALL]
    result = cli("convert", *asked, "--plan", "--processes", "2", "--files", "--bandwidth", "1MB/s")
    assert (result.status, result.err, list(tmp_path.iterdir())) == (0, "", [])
    facts, processes, reads, arrays = result.blocks
    facts = dict(facts)
    assert (facts["path"], facts["processes"], facts["bytes"]) == (
        str(tmp_path / "to" / "0" / "items"),
        "2",
        str(NBYTES),
    )
    assert int(facts["source files"]) == sum(file.stat().st_size for file in HF.glob("*.safetensors"))
    assert processes[0] == [
        "process", "read", "over-read", "reads", "written decoded", "chunks written", "batches", "memory", "time",
    ]  # fmt: skip
    assert sum(int(row[4]) for row in processes[1:]) == NBYTES
    assert float(facts["estimated time"]) == max(float(row[-1]) for row in processes[1:])
    assert sum(int(row[3]) for row in reads[1:]) == sum(int(row[1]) for row in processes[1:])
    assert arrays[0] == ["array", "dtype", "shape", "chunk", "chunks", "chunk bytes"]
    assert sum(int(row[4]) for row in arrays[1:]) == int(facts["chunks"])
    specs = [word for row in arrays[1:] for word in ("--spec", f"^{row[0]}$=-")]
    assert cli("convert", *asked, "--plan", "--mesh", "x=2", *specs).status == 0

    planned = cli("convert", *asked, "--plan", "--json", "--bandwidth", "1MB/s", "--write-latency", "1ms")
    (cost,) = json.loads(planned.out)["processes"]
    assert json.loads(planned.out)["estimate"].keys() == {
        "bandwidth", "latency", "write_bandwidth", "write_latency", "seconds", "slowest", "processes",
    }  # fmt: skip
    done = json.loads(cli("convert", *asked, "--json").out)
    assert (cost["nbytes"], cost["read_requests"] + cost["write_requests"]) == (done["nbytes"], done["requests"])
    again = cli("convert", *asked, "--plan")
    assert (again.status, again.out) == (1, "")
    assert "already exists" in again.err


def test_names_are_those_of_a_plan(cli, tmp_path):
    """Of a restore from the same source, which prints them."""
    leaves = json.loads(cli("inspect", HF, "--family", "maxtext", "--json").out)["leaves"]
    (name,) = (leaf["path"] for leaf in leaves if leaf["path"].endswith("embedding"))
    planned = json.loads(cli("plan", ORBAX, "--mesh", "x=2", "--spec", "kernel=-,x", "--json").out)
    in_orbax = planned["over_reads"][0]["name"]
    assert (name, in_orbax.split(".")[:3]) == ("params.token_embedder.embedding", ["params", "params", "decoder"])
    for own, plan, convert in (
        (name, ["plan", HF, "--family", "maxtext"], ["convert", HF, tmp_path / "to", *TO_ORBAX, "--plan"]),
        (in_orbax, ["plan", ORBAX], ["reshard", ORBAX, tmp_path / "to", "--plan"]),
    ):
        for spec, status in ((f"^{own}$=x", 0), (f"^params.{own}$=x", 2)):
            asked = ["--mesh", "x=2", "--spec", spec]
            planned, converted = cli(*plan, *asked), cli(*convert, *asked)
            assert (planned.status, converted.status) == (status, status)
            errors = [result.err.rpartition("error: ")[2] for result in (planned, converted)]
            assert errors[0] == errors[1]
            assert errors[0].startswith("--spec: " if status else "")


def test_a_plan_of_a_reshard(cli, tmp_path):
    asked = [ORBAX, tmp_path / "to", "--mesh", "x=2", "--spec", "kernel|embedding=x"]
    of_orbax = cli("reshard", *asked, "--plan")
    assert of_orbax.blocks[1][0][1:4] == ["read decoded", "over-read", "chunks read"]
    of_files = cli("reshard", HF, tmp_path / "to", "--max-file-bytes", "50kB", "--plan", "--files")
    facts, _, reads, writes = of_files.blocks
    assert int(dict(facts)["files"]) == len({row[1] for row in writes[1:]}) == 3
    assert sum(int(row[3]) for row in reads[1:]) == sum(int(row[2]) for row in writes[1:])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "2"], "--processes is for --plan"),
        (["--bandwidth", "2GB/s"], "--bandwidth is for --plan"),
        (["--files"], "--files is for --plan"),
        (["--latency", "0s"], "--latency is for --plan"),
        (["--plan", "--resume"], "--resume is not for --plan"),
        (["--plan", "--distributed"], "--distributed is not for --plan"),
        (["--plan", "--latency", "1ms"], "--latency is for an estimate of the time, which also needs --bandwidth"),
        (["--plan", "--write-bandwidth", "1GB/s"], "--write-bandwidth is for an estimate of the time"),
    ],
)
def test_options_of_a_plan_that_do_not_fit(cli, tmp_path, options, message):
    for command in (["convert", HF, tmp_path / "to", "--to", "orbax"], ["reshard", HF, tmp_path / "to"]):
        result = cli(*command, *options)
        assert (result.status, result.out) == (2, "")
        assert message in result.err
