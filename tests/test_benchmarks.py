"""The programs in `benchmarks/`, as far as they get before they measure."""

import os
import subprocess
import sys

import pytest

from tests.support.roots import ROOT

pytestmark = pytest.mark.process

BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "[--directory DIR]" in path.read_text())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_directory_that_is_not_there_is_one_line(program, tmp_path):
    missing = tmp_path / "missing"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / program, "--directory", missing],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"--directory {missing}: is not a directory\n")
    assert not missing.exists()
