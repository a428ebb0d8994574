"""The programs in `benchmarks/`, as far as they get before they measure, and two that measure a little."""

import json
import os
import runpy
import subprocess
import sys

import pytest

from tests.support.family_samples import Sample
from tests.support.roots import ROOT

pytestmark = pytest.mark.process

BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "[--directory DIR]" in path.read_text())


# Runs every program in one process, which imports JAX only once.
RUN_ALL = """
import contextlib, io, json, runpy, sys
directory, *programs = sys.argv[1:]
found = {}
for program in programs:
    sys.argv = [program, "--directory", directory]
    sys.path[0] = program.rpartition("/")[0]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            found[program] = [end.code, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""


def test_a_directory_that_is_not_there_is_one_line(tmp_path):
    missing = tmp_path / "missing"
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, missing, *(str(BENCHMARKS / program) for program in PROGRAMS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert done.returncode == 0, done.stderr
    line = f"--directory {missing}: is not a directory"
    assert json.loads(done.stdout) == {str(BENCHMARKS / program): [line, "", ""] for program in PROGRAMS}
    assert not missing.exists()


def test_a_quick_run_of_restores_onto_accelerators_finds_every_byte_right(tmp_path):
    report = tmp_path / "report.json"
    command = ["accelerator.py", "--quick", "--only", "memory", "--directory", tmp_path, "--json", report]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / command[0], *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "failed" not in done.stdout
    runs = json.loads(report.read_text())["scenarios"]["memory"]["runs"]
    (package,), (mapping,) = runs["this package"], runs["mapping loop"]
    assert package["loaded_bytes"] == mapping["loaded_bytes"] > 50e6
    assert package["seconds"] > 0


def test_a_quick_run_of_deltas_makes_the_newer_checkpoint(tmp_path):
    pytest.importorskip("zstandard", reason="needs the extra delta")
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "delta.py", "--quick", "--directory", tmp_path, "--json", report],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(report.read_text())
    assert 0.009 < found["changed"] < 0.011
    assert {name: len(runs) for name, runs in found["runs"].items()} == {"delta": 1, "apply_delta": 1, "identical": 1}


@pytest.mark.parametrize("name", ["deepseek3", "llama3.1", "qwen3-moe"])
def test_what_restores_are_checked_with_is_what_maxtexts_converter_makes(name):
    sample = Sample(name)
    converted = runpy.run_path(str(BENCHMARKS / "maxtext_reference.py"))["converted"]
    found = converted(sample.model, sample.config, sample.stored)
    expected = sample.made_by_maxtext(True)
    assert {path.replace("-", "."): array.tobytes() for path, array in found.items()} == {
        path: array.tobytes() for path, array in expected.items()
    }
