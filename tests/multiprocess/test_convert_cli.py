"""`convert`, `reshard` and `link` with `--distributed` in real processes, as `mpirun` starts them: all, or nothing.

Whatever happens to one of the processes, all of them end, and what they have left is resumed by another number.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from orbax_safetensors.cli.main import main
from orbax_safetensors.orbax_store import open_orbax
from tests.support import hang
from tests.support.cli_conversions import AFTER_BATCHES
from tests.support.roots import ROOT

HF = ROOT / "testdata" / "maxtext" / "qwen3" / "hf"
ORBAX = ROOT / "testdata" / "orbax" / "qwen3_unscanned"
NBYTES = 138_496
# Each takes more than a dozen batches.
KINDS = {
    "to_orbax": ["convert", HF, "--to", "orbax", "--family", "maxtext"],
    "to_safetensors": ["convert", ORBAX, "--to", "safetensors", "--family", "maxtext", "--config", HF],
    "reshard_orbax": ["reshard", ORBAX, "--mesh", "x=2", "--spec", "kernel|embedding=x"],
}
SMALL = ["--memory", "40kB"]

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

PROGRAM = """
import sys
from orbax_safetensors.cli.main import main
{code}
sys.exit(main([*sys.argv[1:], "--distributed"]))
"""

# How long jax.distributed takes a process that is silent for a living one: nothing else tells the others that a process
# was killed. It decides when they go on, and not what they do.
HEARTBEAT = """
import functools, jax
jax.distributed.initialize = functools.partial(jax.distributed.initialize, heartbeat_timeout_seconds=20)
"""

# As on a disk that is full.
NO_ROOM = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def start(commands, codes=None):
    """Runs a command in each of several processes that are one program; in a process, its code of `codes` runs first.

    All of them have to end by themselves.
    """
    with socket.socket() as reserved:
        # Bound and never listening: it keeps the port from others, and shares it with the coordinator.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        # JAX warns of proxies.
        env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | {
            "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": str(len(commands)),
            "JAX_COORDINATOR_PORT": str(reserved.getsockname()[1]),
        }
        running = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(code=(codes or {}).get(rank, "")), *map(str, argv)],
                cwd=ROOT,
                env={**env, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, argv in enumerate(commands)
        ]
        try:
            texts = [process.communicate(timeout=hang.SECONDS) for process in running]
        finally:
            for process in running:
                process.kill()
        return [Ended(process.returncode, *text) for process, text in zip(running, texts, strict=True)]


def command(kind, destination):
    name, source, *options = KINDS[kind]
    return [name, source, destination, *options, *SMALL]


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def contents(directory):
    """All that is in a step, and how it is stored; OCDBT's own files differ from run to run."""
    opened = open_orbax(directory)
    tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(directory / "0" / "items")
    arrays = {
        jax.tree_util.keystr(at, simple=True, separator="."): (np.asarray(leaf).dtype, np.asarray(leaf).tobytes())
        for at, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    return arrays, opened.leaves, opened.custom_metadata


def made(kind, destination):
    return (contents if kind.endswith("orbax") else files)(destination)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process makes of each kind."""
    root = tmp_path_factory.mktemp("alone")
    for kind in KINDS:
        assert main([str(word) for word in command(kind, root / kind)]) == 0
    return {kind: made(kind, root / kind) for kind in KINDS}


def test_several_make_what_one_makes(tmp_path, alone):
    kind, processes = "to_orbax", 3
    ended = start([[*command(kind, tmp_path / "to"), "--json"]] * processes)
    assert [process.status for process in ended] == [0] * processes, ended
    assert made(kind, tmp_path / "to") == alone[kind]
    assert [path.name for path in tmp_path.iterdir()] == ["to"]
    first, *others = ended
    document = json.loads(first.out)
    assert document["processes"] == processes
    assert 0 < document["nbytes"] < 1.5 * NBYTES / processes
    assert f"{command(kind, '')[0]}, process 0 of {processes}: 0 Bytes of " in first.err
    assert {(process.out, process.err) for process in others} == {("", "")}


def test_a_link_beside_the_files(tmp_path):
    shutil.copytree(HF, tmp_path / "model")
    first, second = start([["link", tmp_path / "model", "--json"]] * 2)
    assert (first.status, second.status) == (0, 0), (first, second)
    assert json.loads(first.out)["path"] == str(tmp_path / "model")
    assert ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).metadata(tmp_path / "model") is not None


def test_one_that_cannot_write_ends_all(tmp_path, alone):
    kind = "to_safetensors"
    first, second = start([command(kind, tmp_path / "to")] * 2, {1: NO_ROOM})
    assert (first.status, first.out, second.status, second.out) == (1, "", 1, ""), (first, second)
    assert "File too large" in second.err
    assert second.err.startswith("error: ")
    assert second.err.count("\n") == 1
    assert first.err.splitlines()[-1].startswith("error: process 1 failed: StorageError: ")
    assert "File too large" in first.err
    assert main([*map(str, command(kind, tmp_path / "to")), "--resume"]) == 0
    assert made(kind, tmp_path / "to") == alone[kind]


def test_one_with_other_arguments_ends_all(tmp_path):
    """Here with an option that is not for the format of the source."""
    reshard = ["reshard", ORBAX, tmp_path / "to"]
    first, second = start([reshard, [*reshard, "--max-file-bytes", "1MB"]])
    error = "error: process 1 failed: UnusedArgumentError: max_file_bytes is not for checkpoints of Orbax\n"
    assert (first.status, first.out, first.err) == (1, "", error)
    assert (second.status, second.out) == (2, "")
    assert second.err.endswith("error: --max-file-bytes is not for checkpoints of Orbax\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [("to_orbax", "SIGINT", [0, 1]), ("reshard_orbax", "SIGTERM", [0])],
)
def test_signals_end_all_and_what_is_left_is_resumed(tmp_path, alone, capsys, kind, name, told):
    ended = start([command(kind, tmp_path / "to")] * 2, dict.fromkeys(told, AFTER_BATCHES.format(name)))
    for rank, process in enumerate(ended):
        assert process.out == ""
        if rank in told:
            assert process.status == 128 + getattr(signal, name), ended
            assert "error" not in process.err
        else:
            assert process.status == 1, ended
            assert process.err.splitlines()[-1] == f"error: process {told[0]} failed: _SignalError: ended by {name}"
    hint = "interrupted: the same command with --resume goes on from here\n"
    assert ended[0].err.endswith(hint) == (0 in told)
    assert hint not in ended[1].err
    assert main([*map(str, command(kind, tmp_path / "to")), "--resume", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["nbytes"] < NBYTES
    assert made(kind, tmp_path / "to") == alone[kind]


def test_a_kill_ends_all_and_another_number_resumes(tmp_path, alone):
    kind = "to_safetensors"
    code = HEARTBEAT + AFTER_BATCHES.format("SIGKILL")
    killed, other = start([command(kind, tmp_path / "to")] * 2, {0: code, 1: HEARTBEAT})
    assert killed.status == -signal.SIGKILL
    # jax.distributed ends the other, in its own words, once it notices; perhaps an error of ours is first.
    assert other.status in (1, -signal.SIGABRT), other
    assert other.err
    assert killed.out == other.out == ""
    assert main([*map(str, command(kind, tmp_path / "to")), "--resume"]) == 0
    assert made(kind, tmp_path / "to") == alone[kind]
