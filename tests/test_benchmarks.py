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


def test_without_a_card_every_leaf_of_a_load_is_checked_and_no_figure_is_shown(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, BENCHMARKS / "accelerator.py", "--only", "fp8"]
    done = subprocess.run(
        [*command, "--directory", tmp_path, "--json", report],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("small: 2 of 2 loads are right\n")
    assert "met" not in done.stdout.lower()
    found = json.loads(report.read_text())
    assert (found["versions"]["device"], found["left_out"]) == ("emulated", [])
    runs = found["scenarios"]["fp8"]["runs"]
    (codes,), (tree,) = runs["codes as stored"], runs["MaxText's tree"]
    assert tree["array_bytes"] > 1.5 * codes["array_bytes"] > 1e8


# Compares the digests of NumPy and JAX: of layers and their stack, of bits that differ, and of other places.
DIGESTS = """
import sys
sys.path.insert(0, sys.argv[1])
import digests, jax, ml_dtypes, numpy as np
random = np.random.default_rng(0)
words = random.integers(0, 2**16, 3 * 64 * 8 * 40, np.uint16).view(ml_dtypes.bfloat16)
leaf = words.reshape(64, 3, 8, 40)
def of(values):
    ((_, _, digest),) = digests.of_devices({"": jax.numpy.asarray(values)}).values()
    assert digest == digests.of_numpy(values), (values.shape, values.dtype)
    return digest
whole = of(leaf)
steps = (digests.STEPS[0], *digests.STEPS[2:])
parts = [digests.of_numpy(leaf[:, n].copy(), steps, n * digests.STEPS[1]) for n in range(3)]
assert sum(parts) % 2**32 == whole
turned = np.ascontiguousarray(leaf.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0)
assert of(turned) == whole
changed = leaf.copy()
changed.view(np.uint16)[63, 2, 7, 39] ^= 1
others = [changed, leaf[::-1], leaf[:, ::-1], leaf[..., ::-1], leaf.reshape(64, 3, 40, 8), leaf.transpose(0, 1, 3, 2)]
assert len({whole, *map(of, others)}) == 7
for values in (leaf.view(np.uint8), leaf.view(np.uint32), leaf.view(np.float32)[0], words, np.float32(1.5), leaf[:0]):
    of(np.asarray(values))
"""


def test_numpy_and_a_device_compute_the_same_digest_and_another_one_of_another_array():
    command = [sys.executable, "-c", DIGESTS, BENCHMARKS]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert (done.returncode, done.stderr) == (0, "")


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
