"""The programs in `benchmarks/`, as far as they get before they measure, and two that measure a little."""

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec

import pytest

from orbax_safetensors.mapping import registry
from tests.support.family_samples import Sample
from tests.support.roots import ROOT

pytestmark = pytest.mark.process

BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "[--directory DIR]" in path.read_text())
if not find_spec("transformers"):
    PROGRAMS = sorted({*PROGRAMS} - {"families_table.py", "sweep_transformers.py"})


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


def run_sweep(program, *arguments):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", BENCHMARKS / program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_sweep_takes_types_of_transformers_there_and_back(tmp_path):
    """Stacked experts, tied embeddings, an encoder with a decoder, and convolutions with buffers."""
    report = tmp_path / "report.json"
    types = ["qwen3_moe", "gpt2", "whisper", "resnet"]
    printed = run_sweep("sweep_transformers.py", "--only", *types, "--directory", tmp_path, "--json", report)
    found = json.loads(report.read_text())
    assert [(outcome["model_type"], outcome["status"]) for outcome in found] == [(name, "equal") for name in types]
    assert all(0 < outcome["sharded"] <= outcome["tensors"] for outcome in found)
    assert all(0 < outcome["parameters"] < 50_000_000 for outcome in found)
    assert "4 equal" in printed


SWEEP_FAILS = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import numpy, sweep_transformers, torch
stored = {"w": torch.tensor([1.0, -0.0]), "b": torch.ones(2, dtype=torch.bfloat16)}
found = {name: tensor.clone() for name, tensor in stored.items()}
sweep_transformers.check("load", found, stored)
wrong = [{"w": torch.tensor([1.0, 0.0])}, {"b": torch.ones(2)}, {"b": torch.ones(2, 1, dtype=torch.bfloat16)}]
for other in ({**found, **wrong[0]}, {**found, **wrong[1]}, {**found, **wrong[2]}, {"w": found["w"]}):
    try:
        sweep_transformers.check("load", other, stored)
    except sweep_transformers.Different as error:
        print(error)
ost = sweep_transformers.ost
ost.load = lambda path, *target: {"w": numpy.zeros(1)}
print(sweep_transformers.sweep("bert", pathlib.Path(sys.argv[2])).status)
"""


def test_the_sweep_notices_a_bit_a_dtype_a_shape_and_a_name(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SWEEP_FAILS, BENCHMARKS, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert done.stdout.splitlines() == [
        "load: 1 of 2 differ: ['w']",
        "load: 1 of 2 differ: ['b']",
        "load: 1 of 2 differ: ['b']",
        "load: missing ['b'], unexpected []",
        "failed",
    ], done.stderr


FAMILIES_TABLE = ROOT / "docs" / "families-table.md"


def test_cells_of_the_table_of_families_are_what_the_program_prints(tmp_path):
    """Of a model that is only moved, and of one that the families compute with and refuse classes of."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    page = FAMILIES_TABLE.read_text()
    if f"`transformers` {transformers.__version__}." not in page:
        pytest.skip(f"the table is of another transformers than {transformers.__version__}")
    printed = run_sweep("families_table.py", "--only", "olmo3", "gemma3_text", "--directory", tmp_path).splitlines()
    assert len(printed) == 6
    for line in printed:
        model_type, name, *cells = line.split("\t")
        assert cells_of(page, model_type, name) == [cells], line


def cells_of(page, model_type, name):
    """The cells of the rows that a class of a model type is in."""
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| `")]
    types = [(re.search(rf"`{name}`(?: \(([^)]*)\))?", classes), cells) for classes, *cells in rows]
    return [cells for found, cells in types if found and (not found[1] or f"`{model_type}`" in found[1])]


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_the_table_of_families_has_a_row_for_each_set_of_cells(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = runpy.run_path(str(BENCHMARKS / "families_table.py"))
    found = [
        program["Outcome"](*outcome)
        for outcome in [
            ("a", "One", ("refused: why", "–")),
            ("a", "Two", ("equal", "–")),
            ("b", "Two", ("refused: why", "–")),
            ("c", "Two", ("refused: why", "–")),
            ("b", "Three", ("equal", "–")),
            ("b", "Four", ()),
        ]
    ]
    page = program["page"](found, "5")
    assert [line for line in page.splitlines() if line.startswith(("| `", "`trans"))] == [
        "| `Three`, `Two` (`a`) | equal | – |",
        "| `One`, `Two` (`b`, `c`) | refused: why | – |",
        "`transformers` makes no small model of `Four`.",
    ]
    assert cells_of(page, "c", "Two") == [["refused: why", "–"]]


def test_the_table_of_families_has_every_class_that_a_family_names():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    named = {name for family in registry.known() for name in family.architectures if hasattr(transformers, name)}
    assert len(named) > 20
    assert named <= set(re.findall(r"`(\w+)`", FAMILIES_TABLE.read_text()))


@pytest.mark.parametrize("name", ["deepseek3", "llama3.1", "qwen3-moe"])
def test_what_restores_are_checked_with_is_what_maxtexts_converter_makes(name):
    sample = Sample(name)
    converted = runpy.run_path(str(BENCHMARKS / "maxtext_reference.py"))["converted"]
    found = converted(sample.model, sample.config, sample.stored)
    expected = sample.made_by_maxtext(True)
    assert {path.replace("-", "."): array.tobytes() for path, array in found.items()} == {
        path: array.tobytes() for path, array in expected.items()
    }
