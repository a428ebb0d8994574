"""The command as a process: exit statuses, streams, and what it does not do."""

import importlib
import importlib.metadata
import json
import logging
import subprocess
import sys

import pytest

from orbax_safetensors.cli.main import COMMANDS
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "qwen3"
COMMAND = [sys.executable, "-m", "orbax_safetensors.cli.main"]


@pytest.mark.process
def test_a_process_prints_and_succeeds(single):
    done = subprocess.run([*COMMAND, "inspect", single, "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["totals"]["tensors"] == 5


@pytest.mark.process
@pytest.mark.parametrize("family", [[], ["--family", "maxtext"]])
def test_a_reader_that_has_enough_is_no_error(family):
    process = subprocess.Popen([*COMMAND, "inspect", QWEN3, *family], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # before anything is printed
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stderr.close()


@pytest.mark.process
def test_no_jax_backend_is_started():
    code = """
import sys
from orbax_safetensors.cli.main import main
for command in (
    ["inspect"],
    ["inspect", "--family", "maxtext"],
    ["verify"],
    ["plan", "--mesh", "x=1000"],
    ["plan", "--mesh", "x=1000", "--family", "maxtext"],
):
    assert main([*command, sys.argv[1]]) == 0, command
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized(), command
"""
    done = subprocess.run([sys.executable, "-c", code, QWEN3], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (["--help"], {"numpy"}),
        (["--version"], {"numpy"}),
        *(([name, "--help"], {"numpy"}) for name in COMMANDS),
        (["families"], set()),
        (["families", "Qwen3ForCausalLM", "--json"], set()),
        (["--completion", "bash"], set()),
    ],
    ids=lambda value: " ".join(value),
)
def test_jax_and_orbax_are_not_imported_for_what_needs_neither(command, unused):
    if "--completion" in command:
        pytest.importorskip("shtab")
    code = """
import sys
from orbax_safetensors.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as stopped:
    status = stopped.code
print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 0
    assert not set(done.stderr.split()) & (
        {"jax", "jaxlib", "orbax", "tensorstore", "etils", "rich", "obstore"} | unused
    )


@pytest.mark.process
def test_names_that_the_locale_cannot_print(tmp_path, single):
    path = tmp_path / "gewicht-é.safetensors"
    single.rename(path)
    environment = {"PYTHONIOENCODING": "ascii", "PATH": ""}
    done = subprocess.run([*COMMAND, "inspect", path], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "gewicht-\\xe9.safetensors" in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["inspect"],
        ["inspect", "a", "b"],
        ["inspect", "a", "--js"],
        ["plan", "a"],
        ["demo", "a", "b"],
    ],
)
def test_mistakes_in_the_command_line_are_status_2(cli, argv):
    result = cli(*argv)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("usage: orbax-safetensors")


def test_a_mistake_is_told_below_one_line_of_usage(cli):
    for argv in (["plan", "there", "--mesh", "x"], ["convert", "there", "to"], ["reshard", "there"], ["link"]):
        assert len(cli(*argv).err.splitlines()) == 2


def test_the_version(cli):
    result = cli("--version")
    assert (result.status, result.out) == (0, f"orbax-safetensors {importlib.metadata.version('orbax_safetensors')}\n")


def test_an_empty_path(cli):
    for argv in (["inspect", ""], ["plan", "", "--mesh", "x=2"], ["link", ""], ["convert", "", "to", "--to", "orbax"]):
        result = cli(*argv)
        assert result.status == 1
        assert " a path or a URL" in result.err


@pytest.mark.parametrize("argv", [["inspect"], ["plan", "--mesh", "x=2"], ["verify"], ["diff", QWEN3], ["demo"]])
def test_errors_are_one_line_and_status_1(cli, tmp_path, argv):
    path = tmp_path / "no\nsuch"
    result = cli(*argv, path)
    assert (result.status, result.out) == (1, "")
    assert result.err == f"error: {tmp_path}/no\\nsuch: no such file or directory\n"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_fits_a_screen(cli, monkeypatch, command):
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = cli(*command, "--help")
        lines = result.out.splitlines()
        assert result.status == 0
        assert max(map(len, lines)) < columns
        assert len(lines) <= 40 or columns < 100
        assert ".md" not in result.out  # which no wheel has


@pytest.mark.parametrize(("command", "reads"), [("verify", "verified"), ("inspect", "read_checkpoint")])
def test_warnings_are_lines_like_errors(cli, single, monkeypatch, command, reads):
    module = importlib.import_module(f"orbax_safetensors.cli.{command}")
    read = getattr(module, reads)

    def warn(path, **options):
        logging.getLogger("orbax_safetensors.storage.retries").warning("%s: trying again", path)
        return read(path, **options)

    monkeypatch.setattr(module, reads, warn)
    assert cli(command, single).err == f"warning: {single}: trying again\n"
    assert logging.getLogger("orbax_safetensors").propagate


def test_an_interrupt_is_status_130(cli, single, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("orbax_safetensors.cli.inspect.read_checkpoint", interrupted)
    assert cli("inspect", single) == (130, "", "")
