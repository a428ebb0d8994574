"""The programs and notebooks in `examples/` run as they stand, in processes that simulate their own eight devices."""

import itertools
import os
import re
import subprocess
import sys

import pytest

import orbax_safetensors as ost
from tests.support import examples, hang
from tests.support.roots import ROOT

MODELS = ROOT / "examples" / "small_models.py"
TRAINING = [ROOT / "examples" / name for name in ("train_and_resume.py", "train_lora.py")]
OF_KERAS = ROOT / "examples" / "keras_hub_family.py"  # tests/interop/test_keras_hub.py runs it
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {MODELS, OF_KERAS, *TRAINING})
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

pytestmark = pytest.mark.process


def run(directory, *command):
    """Run a command of Python's in `directory`, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment["TMPDIR"] = str(directory)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=hang.SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(example, tmp_path):
    printed = run(tmp_path, example)
    assert printed.strip(), "an example says what it has done"
    assert set(re.findall(r"(\d+) devices", printed)) <= {"8"}
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


@pytest.mark.parametrize("example", TRAINING, ids=lambda path: path.stem)
def test_training_that_is_killed(example, tmp_path):
    """The example itself compares what a process resumes from with what the killed one had, bit for bit."""
    printed = run(tmp_path, example, "--kills", "1").splitlines()
    assert sum(line.startswith("killed on a mesh of") for line in printed) == 1
    (resumed,) = (line for line in printed if line.startswith("resumed from steps"))
    assert resumed.endswith("every bit is the same")
    assert list(tmp_path.iterdir()) == []


def test_the_small_models_are_made(tmp_path):
    printed = run(tmp_path, MODELS, tmp_path / "models")
    made = sorted((tmp_path / "models").iterdir())
    assert sorted(line.split(":")[0] for line in printed.splitlines()) == [str(directory) for directory in made]
    assert all(list(directory.glob("*.safetensors")) for directory in made)
    again = run(tmp_path, MODELS, tmp_path / "models")  # as one page after another has it
    assert set(again.splitlines()) == {f"{directory}: is there already" for directory in made}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook(notebook, tmp_path):
    """All of its cells run; its own checks are among them."""
    for needed in ("nbclient", "ipykernel", "torch", "transformers"):
        pytest.importorskip(needed)
    run(tmp_path, "-m", "jupyter", "execute", f"--timeout={hang.SECONDS:.0f}", "--kernel_name=python3", notebook)


def test_families_take_the_small_models(tmp_path):
    examples.make_models(tmp_path)
    for model, family in itertools.product(["qwen3", "llama", "gemma3"], ["maxtext", "tunix"]):
        assert ost.open_checkpoint(tmp_path / model, family=family).leaves
