"""How far a conversion is: a bar on a terminal, lines elsewhere, and warnings above it."""

import io
import json
import logging

import numpy as np
import orbax.checkpoint as ocp
import pytest

from orbax_safetensors.cli import long_run
from orbax_safetensors.cli.main import main
from orbax_safetensors.cli.messages import Messages
from orbax_safetensors.convert import announce
from orbax_safetensors.transfer import progress_bar
from tests.support.cli_conversions import HF, TO_ORBAX, stored
from tests.support.terminal import terminal

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def test_a_terminal_has_a_bar(tmp_path, monkeypatch):
    out, err = (terminal(monkeypatch, 100, stream) for stream in ("stdout", "stderr"))
    assert main(["convert", str(HF), str(tmp_path / "to"), *TO_ORBAX]) == 0
    shown = err.getvalue()
    assert "━" in shown
    assert "100%" in shown
    assert "135.2 KiB of 135.2 KiB, " in shown
    for text in ("path", str(tmp_path / "to" / "0"), "135.2 KiB", "peak memory"):
        assert text in out.getvalue()


def test_a_terminal_keeps_no_bar_of_what_never_began(monkeypatch, tmp_path):
    err = terminal(monkeypatch, 100, "stderr")
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
    warning, beginning, *progress = result.err.splitlines()
    assert warning.startswith(f"warning: {tmp_path / 'from'}: safetensors files hold arrays only, so strings are left ")
    assert beginning.startswith(f"Making {tmp_path / 'to'} from {tmp_path / 'from'}: ")
    assert " 64 Bytes to write, 2.0 GiB of memory at most" in beginning
    assert [line.split(" of ")[0] for line in progress] == ["convert: 0 Bytes", "convert: 64 Bytes"]
    assert list(stored(tmp_path / "to")) == ["w"]


def test_a_warning_is_above_the_bar(monkeypatch):
    stream, logger = terminal(monkeypatch, 40), logging.getLogger("orbax_safetensors")
    text = " ".join(["text"] * 10)
    with long_run.Reporter("convert", stream) as reporter:
        logging.getLogger("orbax_safetensors.convert.conversion").warning("a [red]long\x1b %s", text)
        logging.getLogger("orbax_safetensors.convert.conversion").info("nobody cares")
        announce.logger.info("Making [red]more")
        reporter(1, 1)
    assert f"\x1b[2Kwarning: a [red]long\\x1b {text}\n" in stream.getvalue()
    assert "\x1b[2KMaking [red]more\n" in stream.getvalue()
    assert "cares" not in stream.getvalue()
    assert logger.propagate
    assert announce.logger.level == logging.NOTSET
    assert not any(isinstance(handler, Messages) for handler in logger.handlers)


def test_what_progress_says(monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now)
    stream = io.StringIO()
    with long_run.Reporter("convert", stream) as reporter:
        assert not reporter.begun
        for seconds in (100, 101, 104, 106, 110, 112, 113):
            now = float(seconds)
            reporter((seconds - 100) << 30, 13 << 30)
        assert reporter.begun
    assert stream.getvalue().splitlines() == [
        "convert: 0 Bytes of 13.0 GiB",
        "convert: 6.0 GiB of 13.0 GiB, 1.0 GiB/s, 7 s left",
        "convert: 12.0 GiB of 13.0 GiB, 1.0 GiB/s, 1 s left",
        "convert: 13.0 GiB of 13.0 GiB, 1.0 GiB/s",
    ]
    with long_run.Reporter("convert", None) as silent:
        silent(0, 0)


def test_a_bar_of_nothing_is_full(monkeypatch):
    stream = terminal(monkeypatch, 100)
    with long_run.Reporter("convert", stream) as reporter:
        reporter(0, 0)
    assert "100%" in stream.getvalue()
    assert "0 Bytes of 0 Bytes" in stream.getvalue()
