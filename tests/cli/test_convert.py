"""`convert` and `reshard` as commands, on files that Hugging Face's libraries and MaxText wrote."""

import contextlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.cli import progress
from orbax_safetensors.cli.main import main
from orbax_safetensors.orbax_store import open_orbax
from tests.support.roots import ROOT

DATA = ROOT / "testdata"
QWEN3 = DATA / "qwen3"
HF = DATA / "maxtext" / "qwen3" / "hf"
ORBAX = DATA / "orbax" / "qwen3_unscanned"
NBYTES = 138_496
FAMILY = ["--family", "maxtext"]
TO_ORBAX = ["--to", "orbax", *FAMILY]
TO_SAFETENSORS = ["--to", "safetensors", *FAMILY, "--config", HF]
SMALL = ["--memory", "40kB"]  # a dozen batches and more

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def stored(directory):
    """The tensors of all files, as the reference reader has them."""
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}


def restored(path):
    """The arrays that stock Orbax restores, by name."""
    tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(at, simple=True, separator="."): np.asarray(leaf) for at, leaf in leaves}


def of_maxtext(scanned):
    with np.load(DATA / "maxtext" / "qwen3" / f"mt_{'scanned' if scanned else 'unscanned'}.npz") as arrays:
        return {f"params.{key.replace('-', '.')}": arrays[key] for key in arrays}


def same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def run(*argv, code="", env=None, **options):
    """The command in a process of its own, in which `code` runs first."""
    program = f"import sys\nfrom orbax_safetensors.cli.main import main\n{code}\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=120,
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


# A signal to the process itself after some batches. Programs that a shell starts in the background ignore interrupts.
AFTER_BATCHES = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from orbax_safetensors.cli import progress
told, batches = progress.Reporter.__call__, 0
def call(self, done, total):
    global batches
    told(self, done, total)
    batches += 1
    if batches == 5:
        os.kill(os.getpid(), signal.{})
progress.Reporter.__call__ = call
"""


@pytest.mark.parametrize("scanned", [True, False])
def test_there_and_back(cli, tmp_path, scanned):
    made = cli(
        "convert",
        HF,
        tmp_path / "orbax",
        *TO_ORBAX,
        "--variant",
        f"scan_layers={json.dumps(scanned)}",
        "--json",
        *SMALL,
    )
    assert made.status == 0
    document = json.loads(made.out)
    assert document["path"] == str(tmp_path / "orbax" / "0")
    assert document["nbytes"] == NBYTES
    assert document["processes"] == 1
    assert min(document["seconds"], document["peak_bytes"], document["requests"]) > 0
    arrays = restored(tmp_path / "orbax" / "0" / "items")
    assert arrays.pop("step") == 0
    same(arrays, of_maxtext(scanned))

    back = cli("convert", tmp_path / "orbax", tmp_path / "back", *TO_SAFETENSORS, *SMALL)
    assert (back.status, back.facts["path"], back.facts["bytes"]) == (0, str(tmp_path / "back"), str(NBYTES))
    assert list(back.facts) == ["path", "bytes", "time", "peak memory", "requests"]
    same(stored(tmp_path / "back"), stored(HF))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "qwen3"


def test_what_maxtext_wrote(cli, tmp_path):
    assert cli("convert", ORBAX, tmp_path / "hf", *TO_SAFETENSORS).status == 0
    same(stored(tmp_path / "hf"), stored(HF))


def test_the_options_to_orbax(cli, tmp_path):
    result = cli(
        "convert", QWEN3, tmp_path / "orbax", *TO_ORBAX, "--step", "7", "--no-compression",
        "--dtype", "norm|scale=float32", "--dtype", "kernel$=bfloat16", "--mesh", "fsdp=2,tensor=2",
        "--spec", "wi_0=fsdp,-,tensor", "--spec", "embedding=fsdp+tensor", "--spec", "wo=,,tensor",
    )  # fmt: skip
    assert result.status == 0
    found = open_orbax(tmp_path / "orbax")
    assert found.step == 7
    leaf = found.leaves["params.params.decoder.layers.mlp.wi_0.kernel"]
    assert leaf.dtype == "bfloat16"
    assert leaf.chunk_shape == (leaf.shape[0] // 2, leaf.shape[1], leaf.shape[2] // 2)
    assert dict(zip(leaf.sharding.axis_names, leaf.sharding.shape, strict=True)) == {"fsdp": 2, "tensor": 2}
    embedding = found.leaves["params.params.token_embedder.embedding"]
    assert embedding.chunk_shape[0] == embedding.shape[0] // 4
    assert found.leaves["params.params.decoder.decoder_norm.scale"].dtype == "float32"


def test_names_are_kept_without_a_family(cli, tmp_path, directory, parts):
    assert cli("convert", directory, tmp_path / "orbax", "--to", "orbax", "--dtype", "float32").status == 0
    found = restored(tmp_path / "orbax" / "0" / "items")
    assert {name: array.dtype.name for name, array in found.items()} == {
        "layer.0.kernel": "float32", "layer.0.bias": "float32", "layer.1.kernel": "float32", "odd": "uint8",
        "steps": found["steps"].dtype.name,
    }  # fmt: skip
    np.testing.assert_array_equal(found["layer.1.kernel"], parts[1]["layer.1.kernel"].astype(np.float32))


def test_reshard_of_orbax(cli, tmp_path):
    result = cli("reshard", ORBAX, tmp_path, "--mesh", "fsdp=2", "--spec", "kernel|embedding=fsdp", *SMALL, "--json")
    assert result.status == 0
    assert json.loads(result.out)["path"] == str(tmp_path / "0")
    arrays = restored(tmp_path / "0" / "items")
    assert arrays.pop("step") == 0
    same(arrays, of_maxtext(scanned=False))
    leaf = open_orbax(tmp_path).leaves["params.params.token_embedder.embedding"]
    assert leaf.chunk_shape[0] <= leaf.shape[0] // 2


def test_reshard_of_safetensors(cli, tmp_path):
    assert cli("reshard", QWEN3, tmp_path / "one").status == 0
    assert [path.name for path in sorted((tmp_path / "one").iterdir())] == ["config.json", "model.safetensors"]
    assert cli("reshard", QWEN3, tmp_path / "many", "--max-file-bytes", "20kB").status == 0
    for name in ("one", "many"):
        same(stored(tmp_path / name), stored(QWEN3))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert cli("reshard", QWEN3, tmp_path / "mesh", "--mesh", "x=4", "--spec", "embed_tokens=x").status == 0
    assert len(list((tmp_path / "mesh").glob("*.safetensors"))) == 4
    assert cli("verify", tmp_path / "mesh").status == 0
    same(ost.SafetensorsHandler().restore(tmp_path / "mesh"), stored(QWEN3))


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


def test_nobody_reads_how_far_it_is(tmp_path):
    closed, broken = os.pipe()
    os.close(closed)
    code = f"from orbax_safetensors.cli import progress\nprogress._LINE_SECONDS = 0\nimport os\nos.dup2({broken}, 2)"
    done = run("reshard", QWEN3, tmp_path / "to", *SMALL, "--json", code=code, pass_fds=[broken])
    os.close(broken)
    assert done.returncode == 0
    assert json.loads(done.stdout)["nbytes"] == NBYTES
    same(stored(tmp_path / "to"), stored(QWEN3))


def test_nobody_reads_what_was_done(tmp_path):
    closed, broken = os.pipe()
    os.close(closed)
    code = f"import os\nos.dup2({broken}, 1)"
    done = run("reshard", QWEN3, tmp_path / "to", "--json", code=code, pass_fds=[broken])
    os.close(broken)
    assert done.returncode == 141
    assert "Error" not in done.stderr
    same(stored(tmp_path / "to"), stored(QWEN3))


def test_a_process_in_a_pipe(tmp_path):
    code = "from orbax_safetensors.cli import progress\nprogress._LINE_SECONDS = 0"
    done = run("convert", HF, tmp_path / "to", *TO_ORBAX, *SMALL, "--json", code=code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nbytes"] == NBYTES
    lines = done.stderr.splitlines()
    assert len(lines) > 5
    assert lines[0] == "convert: 0 B of 135.2 KiB"
    assert lines[-1].startswith("convert: 135.2 KiB of 135.2 KiB, ")
    for line in lines[1:-1]:
        assert line.endswith(" left")


def test_no_accelerator_is_taken(tmp_path):
    code = """
import atexit, jax
atexit.register(lambda: print(jax.config.jax_platforms, file=sys.stderr))
"""
    done = run("convert", HF, tmp_path / "to", *TO_ORBAX, code=code, env={"JAX_PLATFORMS": ""})
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "cpu")


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
            (out, err), silent = (process.communicate(timeout=120) for process in running)
        finally:
            for process in running:
                process.kill()
    assert [process.returncode for process in running] == [0, 0], err + silent[1]
    document = json.loads(out)
    assert document["processes"] == 2
    assert 0 < document["nbytes"] < NBYTES
    assert "convert, process 0 of 2: 0 B of " in err
    assert silent[0] == ""
    assert "convert" not in silent[1]
    arrays = restored(tmp_path / "to" / "0" / "items")
    assert arrays.pop("step") == 0
    same(arrays, of_maxtext(scanned=True))


def test_an_interrupt_while_the_others_do_not_come(tmp_path):
    env = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    env |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "JAX_COORDINATOR_PORT": "9"}
    code = """
import os, signal, threading
from jax._src import distributed
signal.signal(signal.SIGINT, signal.default_int_handler)
make = distributed._jax.get_distributed_runtime_client
def soon(*args, **options):
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    return make(*args, **options)
distributed._jax.get_distributed_runtime_client = soon
"""
    done = run("convert", HF, tmp_path / "to", *TO_ORBAX, "--distributed", code=code, env=env)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")


def test_a_cluster_that_is_not_there(tmp_path):
    done = run("reshard", QWEN3, tmp_path / "to", "--distributed")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: jax.distributed cannot be started: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["convert", "none", "to", "--to", "orbax"], "none: cannot be listed: No such file or directory"),
        (["reshard", "none", "to"], "none: cannot be listed: No such file or directory"),
        (["convert", "empty", "to", "--to", "orbax"], "empty: has no .safetensors files"),
        (["convert", "empty", "to", "--to", "safetensors"], "empty: holds no finished checkpoint of Orbax"),
        (["reshard", "empty", "to"], "empty: holds no finished checkpoint of Orbax"),
        (["convert", QWEN3, "file/to", *TO_ORBAX, "--json"], "file/to/0.orbax-checkpoint-tmp: cannot be made: "),
        (["convert", ORBAX, "file/to", *TO_SAFETENSORS, "--json"], "file/to.partial: cannot be made: "),
        (["reshard", QWEN3, "file/to"], "file/to.partial: cannot be made: "),
        (["convert", QWEN3, "to", *TO_SAFETENSORS], "qwen3: is not a checkpoint of Orbax"),
        (["convert", ORBAX, "to", *TO_ORBAX], "qwen3_unscanned: has no .safetensors files"),
        (["convert", QWEN3, "there", *TO_ORBAX, "--step", "3"], "there/3: already exists"),
        (["convert", QWEN3, "to", "--to", "orbax", "--family", "nonsense"], "nonsense"),
        (["convert", ORBAX, "to", *TO_SAFETENSORS, "--memory", "100"], "memory_bytes is 100"),
        (["reshard", QWEN3, "there"], "there: already exists"),
    ],
)
def test_errors_are_one_line_and_status_1(cli, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "3").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    result = cli(*argv)
    assert (result.status, result.out) == (1, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["convert", QWEN3, "to"], "--to"),
        (["convert", QWEN3, "to", "--to", "pickle"], "invalid choice"),
        (["convert", QWEN3, "--to", "orbax"], "DESTINATION"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--config", QWEN3], "--config is not for --to orbax"),
        (["convert", ORBAX, "to", *TO_SAFETENSORS, "--mesh", "x=2"], "--mesh is not for --to safetensors"),
        (["convert", ORBAX, "to", *TO_SAFETENSORS, "--step", "0"], "--step is not for --to safetensors"),
        (["convert", ORBAX, "to", *TO_SAFETENSORS, "--no-compression"], "--no-compression is not for"),
        (["convert", QWEN3, "to", "--to", "orbax", "--variant", "scan_layers=false"], "--variant is for a --family"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "float99"], "expected DTYPE or REGEX=DTYPE"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "(=float32"], "is no regular expression"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "float32", "--dtype", "a=float16"], "--dtype is either"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "a=float32", "--dtype", "a=float16"], "--dtype is either"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--memory", "lots"], "expected a number of bytes above 0"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--memory", "0"], "expected a number of bytes above 0"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--step", "-1"], "--step"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--step", "last"], "expected the number of a step"),
        (["reshard", ORBAX, "to", "--spec", "a=x"], "--spec names the axes of a --mesh"),
        (["reshard", ORBAX, "to", "--mesh", "x=2", "--spec", "a=y"], "the mesh has no axis 'y', it is x=2"),
        (["reshard", ORBAX, "to", "--mesh", "x=2", "--spec", "a=x", "--spec", "a=-"], "is there twice"),
        (["reshard", ORBAX, "to", "--mesh", "x=7", "--spec", "embedding=x"], "error: --spec: 'embedding': 'params."),
        (["reshard", QWEN3, "to", "--mesh", "x=2", "--spec", "norm=-,-,x"], "expected at most"),
        (["reshard", QWEN3, "to", "--mesh", "x=2", "--spec", "nrom=x"], "error: --spec: 'nrom' is found in none of"),
        (
            ["convert", QWEN3, "to", *TO_ORBAX, "--mesh", "x=2", "--spec", "a=x", "--spec", "a$=x", "--plan"],
            "--spec: 'a",
        ),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "nrom=float32"], "error: --dtype: 'nrom' is found in none of"),
        (["plan", ORBAX, "--mesh", "x=7", "--spec", "embedding=x"], "error: --spec: 'embedding': 'params."),
        (["plan", QWEN3, "--mesh", "x=2", "--spec", "nrom=x"], "error: --spec: 'nrom' is found in none of"),
        (["reshard", ORBAX, "to", "--max-file-bytes", "5GB"], "--max-file-bytes is for safetensors"),
        (["reshard", QWEN3, "to", "--max-file-bytes", "5GB", "--mesh", "x=2"], "--max-file-bytes is not for a --mesh"),
        (["reshard", QWEN3, "to", "--no-compression"], "--no-compression is for Orbax"),
        (["reshard", QWEN3, "to", "--to", "orbax"], "unrecognized arguments"),
    ],
)
def test_mistakes_in_the_command_line_are_status_2(cli, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    result = cli(*argv)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("usage: orbax-safetensors")
    assert message in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_help_fits_a_terminal_and_has_every_option(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    result = cli(command, "--help")
    assert result.status == 0
    assert max(len(line) for line in result.out.splitlines()) < 80
    for word in ("--mesh", "--spec", "--memory", "--resume", "--distributed", "--json", "examples:", "exit status:"):
        assert word in result.out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_a_bar(tmp_path, monkeypatch):
    out, err = Terminal(), Terminal()
    for name, value in {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert main(["convert", str(HF), str(tmp_path / "to"), *TO_ORBAX]) == 0
    shown = err.getvalue()
    assert "━" in shown
    assert "100%" in shown
    assert "135.2 KiB of 135.2 KiB, " in shown
    for text in ("path", str(tmp_path / "to" / "0"), "135.2 KiB", "peak memory"):
        assert text in out.getvalue()


def test_a_terminal_keeps_no_bar_of_what_never_began(monkeypatch, tmp_path):
    err = Terminal()
    for name, value in {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", err)
    assert main(["reshard", str(tmp_path), str(tmp_path / "to")]) == 1
    _, erased, left = err.getvalue().rpartition("\x1b[2K")
    assert erased
    assert "━" not in left
    assert left.endswith(f"error: {tmp_path}: holds no finished checkpoint of Orbax, and no .safetensors file\n")


def test_a_warning_is_a_line_like_an_error(cli, tmp_path):
    tree = {"w": np.ones((4, 4), np.float32), "s": "text"}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "from", tree)
    result = cli("convert", tmp_path / "from", tmp_path / "to", "--to", "safetensors", "--json")
    assert json.loads(result.out)["nbytes"] == 64
    warning, *progress = result.err.splitlines()
    assert warning.startswith(f"warning: {tmp_path / 'from'}: safetensors files hold arrays only, so strings are left ")
    planned = cli("convert", tmp_path / "from", tmp_path / "planned", "--to", "safetensors", "--plan")
    assert planned.err == f"{warning}\n"
    assert [line.split(" of ")[0] for line in progress] == ["convert: 0 B", "convert: 64 B"]
    assert list(stored(tmp_path / "to")) == ["w"]


def test_a_warning_is_above_the_bar(monkeypatch):
    for name, value in {"COLUMNS": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    stream, logger = Terminal(), logging.getLogger("orbax_safetensors")
    with progress.Reporter("convert", stream) as reporter:
        logging.getLogger("orbax_safetensors.convert.run").warning("a [red]long\x1b %s", "text " * 10)
        logging.getLogger("orbax_safetensors.convert.run").info("nobody cares")
        reporter(1, 1)
    assert f"\x1b[2Kwarning: a [red]long\\x1b {'text ' * 10}\n" in stream.getvalue()
    assert "cares" not in stream.getvalue()
    assert logger.propagate
    assert not any(isinstance(handler, progress.Warnings) for handler in logger.handlers)


def test_what_progress_says(monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    stream = io.StringIO()
    with progress.Reporter("convert", stream) as reporter:
        assert not reporter.begun
        for seconds in (100, 101, 104, 106, 110, 112, 113):
            now = float(seconds)
            reporter((seconds - 100) << 30, 13 << 30)
        assert reporter.begun
    assert stream.getvalue().splitlines() == [
        "convert: 0 B of 13.0 GiB",
        "convert: 6.0 GiB of 13.0 GiB, 1.0 GiB/s, 7 s left",
        "convert: 12.0 GiB of 13.0 GiB, 1.0 GiB/s, 1 s left",
        "convert: 13.0 GiB of 13.0 GiB, 1.0 GiB/s",
    ]
    with progress.Reporter("convert", None) as silent:
        silent(0, 0)


def test_a_bar_of_nothing_is_full(monkeypatch):
    for name, value in {"COLUMNS": "100", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    with progress.Reporter("convert", stream) as reporter:
        reporter(0, 0)
    assert "100%" in stream.getvalue()
    assert "0 B of 0 B" in stream.getvalue()


def test_a_plan_of_a_conversion(cli, tmp_path):
    asked = [HF, tmp_path / "to", *TO_ORBAX, *SMALL]
    result = cli("convert", *asked, "--plan", "--processes", "2", "--files", "--bandwidth", "1MB/s")
    assert (result.status, result.err, list(tmp_path.iterdir())) == (0, "", [])
    facts, processes, reads, arrays = result.blocks
    facts = dict(facts)
    assert (facts["path"], facts["processes"], facts["bytes"]) == (str(tmp_path / "to" / "0"), "2", str(NBYTES))
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
