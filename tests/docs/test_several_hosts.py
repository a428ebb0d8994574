"""The page on several hosts: its program runs in the processes that its commands start."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import orbax_safetensors as ost
from tests.support import examples, hang
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "several-hosts.md"

pytestmark = pytest.mark.process


def test_the_examples(tmp_path):
    llama = examples.make_models(tmp_path)["llama"]
    program, of_some_processes = examples.python(PAGE)
    (commands,) = examples.blocks(PAGE, "bash")
    (printed,) = examples.blocks(PAGE, "text")
    (tmp_path / "hosts.py").write_text(program.replace(examples.MODELS, f"{tmp_path}/"))
    with socket.socket() as reserved:
        # Bound and never listening: it keeps the port from others, and shares it with the coordinator.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        done = subprocess.run(
            ["bash", "-c", commands.text.replace("9876", str(reserved.getsockname()[1]))],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",  # which old versions of JAX do not choose by themselves
            },
            capture_output=True,
            text=True,
            timeout=hang.SECONDS,
            check=False,
        )
    missing = [line for line in printed.text.splitlines() if line not in done.stdout]  # Gloo's are between them
    assert missing == [], done.stdout + done.stderr
    saved = ost.load(tmp_path / "saved")
    assert saved.keys() == llama.keys()
    assert all(saved[name].tobytes() == array.tobytes() for name, array in llama.items())
    examples.run(of_some_processes, tmp_path, {"ost": ost})
