"""What a command line that is misspelt is told, and what a shell completes."""

import builtins
import os
import shutil
import subprocess

import pytest

from orbax_safetensors.cli.main import parser
from orbax_safetensors.cli.parser import SHELLS
from tests.support.roots import ROOT

BASH = shutil.which("bash")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspct", "there"], "there is no command 'inspct' (nearest: 'inspect')"),
        (["xyzzy"], "there is no command 'xyzzy'\n"),
        (["inspect", "there", "--grap", "x"], "there is no option --grap (nearest: --grep)"),
        (["plan", "there", "--mseh=x=2"], "there is no option --mseh (nearest: --mesh)"),
        (["inspect", "there", "--to", "x"], "there is no option --to\n"),
        (["inspect", "there", "--js"], "there is no option --js"),
    ],
)
def test_a_mistake_is_told_with_what_is_similar(cli, argv, message):
    result = cli(*argv)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_what_only_looks_like_an_option(cli, single):
    assert cli("inspect", single, "--grep=--x").status == 0
    assert cli("inspect", single, "--grep", "--a b").status == 0
    assert cli("inspect", "--", "--grap").err == "error: --grap: no such file or directory\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_commands_options_and_families(cli, shell):
    pytest.importorskip("shtab")
    result = cli("--completion", shell)
    assert (result.status, result.err) == (0, "")
    for word in ("reshard", "--family", "maxtext", "maxtext.qwen3"):
        assert word in result.out


def test_without_shtab(cli, monkeypatch):
    imported = builtins.__import__

    def missing(name, *rest):
        if name == "shtab":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    result = cli("--completion", "bash")
    assert (result.status, result.out) == (2, "")
    assert "--completion needs shtab: pip install shtab" in result.err


@pytest.mark.process
@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["d"], {"delta", "demo", "diff"}),
        (["inspect", "--st"], {"--stats"}),
        (
            ["plan", "there", "--family", "tun"],
            {
                "tunix",
                *(f"tunix.{model}" for model in ("gemma", "gemma2", "gemma3", "gemma4", "llama3", "qwen2", "qwen3")),
            },
        ),
        (["verify", "setup."], {"setup.cfg"}),
    ],
)
def test_bash_completes(tmp_path, words, found):
    pytest.importorskip("shtab")
    (tmp_path / "script").write_text(parser().completions("bash"))
    program = f"""
source {tmp_path}/script
COMP_WORDS=(orbax-safetensors {" ".join(words)})
COMP_CWORD={len(words)}
_shtab_orbax_safetensors
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run([BASH, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert set(done.stdout.split()) == found
