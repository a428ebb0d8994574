"""`convert` and `reshard` as processes: signals, closed pipes, accelerators, and several processes at once."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

import orbax_safetensors as ost
from tests.support import hang
from tests.support.cli_conversions import (
    AFTER_BATCHES,
    HF,
    NBYTES,
    ORBAX,
    QWEN3,
    SMALL,
    TO_ORBAX,
    TO_SAFETENSORS,
    of_maxtext,
    restored,
    same,
    stored,
)
from tests.support.roots import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def run(*argv, code="", env=None, **options):
    """The command in a process of its own, in which `code` runs first."""
    program = f"import sys\nfrom orbax_safetensors.cli.main import main\n{code}\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=hang.SECONDS,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        **options,
    )


@contextlib.contextmanager
def handling(handler):
    """Interrupts are handled like this, however the tests were started."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.process
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
@pytest.mark.parametrize(
    ("argv", "destination", "made"),
    [
        (["convert", HF, *TO_ORBAX], "orbax", "orbax/0"),
        (["convert", ORBAX, *TO_SAFETENSORS], "hf", "hf"),
        (["reshard", ORBAX], "new", "new/0"),
        (["reshard", QWEN3], "files", "files"),
    ],
)
def test_stopped_and_resumed(cli, tmp_path, argv, destination, made, name):
    argv = [*argv[:2], tmp_path / destination, *argv[2:], *SMALL]
    stopped = run(*argv, code=AFTER_BATCHES.format(name))
    assert stopped.stdout == ""
    if name == "SIGKILL":
        assert stopped.returncode == -signal.SIGKILL, stopped.stderr
    else:
        assert stopped.returncode == 130, stopped.stderr
        assert stopped.stderr.endswith("\ninterrupted: the same command with --resume goes on from here\n")
    assert not (tmp_path / made).exists()
    result = cli(*argv, "--resume", "--json")
    assert result.status == 0, result.err
    assert 0 < json.loads(result.out)["nbytes"] < NBYTES
    if "0" in made:
        arrays = restored(tmp_path / made / "items")
        assert arrays.pop("step") == 0
        same(arrays, of_maxtext(scanned="orbax" in made))
    else:
        same(stored(tmp_path / made), stored(HF if destination == "hf" else QWEN3))
    assert [path.name for path in tmp_path.iterdir()] == [destination]


@pytest.mark.process
def test_terminated_and_resumed(cli, tmp_path):
    argv = ["convert", HF, tmp_path / "orbax", *TO_ORBAX, *SMALL]
    stopped = run(*argv, "--json", code=AFTER_BATCHES.format("SIGTERM"))
    assert (stopped.returncode, stopped.stdout) == (143, ""), stopped.stderr
    assert stopped.stderr.endswith("\ninterrupted: the same command with --resume goes on from here\n")
    assert cli(*argv, "--resume").status == 0
    arrays = restored(tmp_path / "orbax" / "0" / "items")
    assert arrays.pop("step") == 0
    same(arrays, of_maxtext(scanned=True))


def test_an_interrupt_before_anything_began(cli, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("orbax_safetensors.cli.convert.convert", interrupted)
    with handling(signal.default_int_handler):
        assert cli("convert", HF, tmp_path / "to", *TO_ORBAX) == (130, "", "")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupt_that_is_ignored_stays_so(cli, tmp_path, monkeypatch):
    convert = ost.convert

    def interrupted(*args, **options):
        signal.raise_signal(signal.SIGINT)
        return convert(*args, **options)

    monkeypatch.setattr("orbax_safetensors.cli.convert.convert", interrupted)
    with handling(signal.SIG_IGN):
        assert cli("convert", HF, tmp_path / "to", *TO_ORBAX).status == 0


@pytest.mark.process
def test_nobody_reads_how_far_it_is(tmp_path):
    closed, broken = os.pipe()
    os.close(closed)
    code = "from orbax_safetensors.transfer import progress_bar\nprogress_bar._LINE_SECONDS = 0\n"
    code += f"import os\nos.dup2({broken}, 2)"
    done = run("reshard", QWEN3, tmp_path / "to", *SMALL, "--json", code=code, pass_fds=[broken])
    os.close(broken)
    assert done.returncode == 0
    assert json.loads(done.stdout)["nbytes"] == NBYTES
    same(stored(tmp_path / "to"), stored(QWEN3))


@pytest.mark.process
def test_nobody_reads_what_was_done(tmp_path):
    closed, broken = os.pipe()
    os.close(closed)
    code = f"import os\nos.dup2({broken}, 1)"
    done = run("reshard", QWEN3, tmp_path / "to", "--json", code=code, pass_fds=[broken])
    os.close(broken)
    assert done.returncode == 141
    assert "Error" not in done.stderr
    same(stored(tmp_path / "to"), stored(QWEN3))


@pytest.mark.process
def test_a_process_in_a_pipe(tmp_path):
    code = "from orbax_safetensors.transfer import progress_bar\nprogress_bar._LINE_SECONDS = 0"
    done = run("convert", HF, tmp_path / "to", *TO_ORBAX, *SMALL, "--json", code=code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nbytes"] == NBYTES
    beginning, *lines = done.stderr.splitlines()
    assert beginning.startswith(f"Making {tmp_path}/to/0/items from {HF}: ")
    assert len(lines) > 5
    assert lines[0] == "convert: 0 Bytes of 135.2 KiB"
    assert lines[-1].startswith("convert: 135.2 KiB of 135.2 KiB, ")
    for line in lines[1:-1]:
        assert line.endswith(" left")


@pytest.mark.process
def test_no_accelerator_is_taken(tmp_path):
    code = """
import atexit, jax
atexit.register(lambda: print(jax.config.jax_platforms, file=sys.stderr))
"""
    done = run("convert", HF, tmp_path / "to", *TO_ORBAX, code=code, env={"JAX_PLATFORMS": ""})
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "cpu")


@pytest.mark.process
def test_several_processes(tmp_path):
    with socket.socket() as reserved:
        # Bound and never listening: it keeps the port from others, and shares it with the coordinator.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "orbax_safetensors.cli.main", "convert", HF, tmp_path / "to", *TO_ORBAX, *SMALL]
                + ["--distributed", "--json"],
                # As Slurm sets it.
                env={name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
                | {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
                | {"SLURM_PROCID": str(process), "SLURM_LOCALID": str(process)}
                | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{reserved.getsockname()[1]}"},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in range(2)
        ]
        try:
            (out, err), silent = (process.communicate(timeout=hang.SECONDS) for process in running)
        finally:
            for process in running:
                process.kill()
    assert [process.returncode for process in running] == [0, 0], err + silent[1]
    document = json.loads(out)
    assert document["processes"] == 2
    assert 0 < document["nbytes"] < NBYTES
    assert "convert, process 0 of 2: 0 Bytes of " in err
    assert silent[0] == ""
    assert "convert" not in silent[1]
    arrays = restored(tmp_path / "to" / "0" / "items")
    assert arrays.pop("step") == 0
    same(arrays, of_maxtext(scanned=True))


@pytest.mark.process
def test_an_interrupt_while_the_others_do_not_come(tmp_path):
    env = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    env |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "JAX_COORDINATOR_PORT": "9"}
    code = """
import os, signal
from jax._src import distributed
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupted(*args, **options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:  # the handler of Python, which does not run while the program waits for the others
        os._exit(7)
distributed._jax.get_distributed_runtime_client = interrupted
"""
    done = run("convert", HF, tmp_path / "to", *TO_ORBAX, "--distributed", code=code, env=env)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")


@pytest.mark.process
def test_a_cluster_that_is_not_there(tmp_path):
    done = run("reshard", QWEN3, tmp_path / "to", "--distributed")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: jax.distributed cannot be started: ")
    assert done.stderr.count("\n") == 1
