"""Every step of a training run is a whole model as soon as it has its name, for programs that read meanwhile."""

import importlib.util
import time

import flax.nnx as nnx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import orbax_safetensors as ost
from tests.support.roots import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.process

TOKENS = np.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_and_resume", ROOT / "examples" / "train_and_resume.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits_of_nnx(example, path):
    graph, abstract = nnx.split(nnx.eval_shape(lambda: example.Llama(nnx.Rngs(0))), nnx.Param)
    with jax.numpy_dtype_promotion("standard"):
        return nnx.merge(graph, ost.load(path, abstract, family=example.FAMILY))(TOKENS)


def logits_of_transformers(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def test_a_reader_that_polls_sees_whole_steps_only(example, tmp_path):
    source, run = tmp_path / "source", tmp_path / "run"
    example.make_source(source)
    training = example.start(source, run, (2, 4))
    seen = {}
    try:
        while training.poll() is None:
            for name in example.finished(run) if run.is_dir() else []:
                path = run / name / "params"
                if name in seen:
                    continue
                try:
                    faults = ost.verify(path, data=True)
                    seen[name] = (faults, example.digest(ost.load(path, family=example.FAMILY)))
                except ost.StorageError:
                    # Only what `max_to_keep` has deleted cannot be read.
                    deadline = time.monotonic() + 5
                    while (run / name).exists() and time.monotonic() < deadline:
                        time.sleep(0.01)
                    assert not (run / name).exists()
            time.sleep(0.001)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 0
    expected = {str(line["step"]): line["parameters"] for line in example.lines(run)}
    assert seen
    assert all(found == ([], expected[name]) for name, found in seen.items())
    assert sorted(map(int, example.finished(run))) == [18, 19, 20]
    for name in example.finished(run):
        path = run / name / "params"
        np.testing.assert_allclose(logits_of_transformers(path), logits_of_nnx(example, path), rtol=1e-4, atol=1e-5)
    # The model at the end is like the source.
    tuned, before = (load_file(at / "model.safetensors") for at in (tmp_path / "tuned", source))
    assert {name: (x.dtype, x.shape) for name, x in tuned.items()} == {
        name: (x.dtype, x.shape) for name, x in before.items()
    }
    assert (tmp_path / "tuned" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    trained = load_file(run / "20" / "params" / "model.safetensors")
    for name, array in tuned.items():
        assert array.tobytes() == trained[name].astype(array.dtype).tobytes()
    assert np.isfinite(logits_of_transformers(tmp_path / "tuned")).all()
