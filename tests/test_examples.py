"""The programs in `examples/` run as they stand, each in a process with eight simulated devices."""

import os
import subprocess
import sys

import pytest

from tests.support.roots import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.process


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(example, tmp_path):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, example],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example says what it has done"
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"
