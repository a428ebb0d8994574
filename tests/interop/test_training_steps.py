"""Every step of a training run is a whole model as soon as it has its name, for programs that read meanwhile.

The models and adapters of the examples, in `transformers` and PEFT, while other processes train and delete them.
"""

import importlib

import flax.nnx as nnx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import orbax_safetensors as ost
from tests.support import hang
from tests.support.roots import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.process,
    # PEFT asks models of `transformers` by a name that these give up.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TOKENS = np.arange(12).reshape(2, 6)
STEPS = 20


@pytest.fixture
def examples(monkeypatch):
    """The modules of both examples, one of which imports the other as a program beside it does."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("train_and_resume"), importlib.import_module("train_lora")


def logits_of_nnx(make, *states):
    graph = nnx.graphdef(nnx.eval_shape(make))
    with jax.numpy_dtype_promotion("standard"):
        return np.asarray(nnx.merge(graph, *states)(TOKENS))


def logits_of_torch(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def causal_lm(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def seen_while_training(example, program, tmp_path, look):
    """Train in another process; return by step what `look` returns of its directory as soon as that has its name."""
    source, run = tmp_path / "source", tmp_path / "run"
    example.make_source(source)
    training = example.start(ROOT / "examples" / program, source, run, STEPS, (2, 4))
    seen = {}
    try:
        while training.poll() is None:
            for step in set(example.finished(run)) - seen.keys():
                try:
                    seen[step] = look(run / str(step))
                except (OSError, ValueError):
                    # Only what `max_to_keep` has deleted cannot be read. PEFT takes its path for a name on the Hub.
                    while (run / str(step)).exists():
                        hang.pause()
            hang.pause()
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 0
    assert example.finished(run) == [STEPS - 2, STEPS - 1, STEPS]
    seen |= {step: look(run / str(step)) for step in example.finished(run)}
    assert len(seen) > 3, "the training ended before a step was read"
    digests = {line["step"]: line["trained"] for line in example.lines(run)}
    return {step: (found, digests[step]) for step, found in seen.items()}


def test_steps_are_models_of_transformers(examples, tmp_path):
    example, _ = examples

    def look(step):
        path = step / "params"
        for fault in ost.verify(path, data=True):
            raise fault
        weights = ost.load(path, family=example.FAMILY, options=ost.SafetensorsOptions(checksums=True))
        return example.digest(weights), causal_lm(path).state_dict(), weights

    def make():
        return example.Llama(nnx.Rngs(0))

    for (digest, state, weights), expected in seen_while_training(
        example, "train_and_resume.py", tmp_path, look
    ).values():
        assert digest == expected
        (embedding,) = map(np.asarray, jax.tree.leaves(weights["embedding"]))
        assert state["model.embed_tokens.weight"].numpy().tobytes() == embedding.tobytes()
    abstract = nnx.state(nnx.eval_shape(make), nnx.Param)
    path = tmp_path / "run" / str(STEPS) / "params"
    found = logits_of_nnx(make, ost.load(path, abstract, family=example.FAMILY))
    np.testing.assert_allclose(logits_of_torch(causal_lm(path)), found, rtol=1e-4, atol=1e-5)

    # The model at the end is like the source.
    source, tuned = tmp_path / "source", tmp_path / "tuned"
    before, after = (load_file(at / "model.safetensors") for at in (source, tuned))
    assert {name: (x.dtype, x.shape) for name, x in after.items()} == {
        name: (x.dtype, x.shape) for name, x in before.items()
    }
    assert (tuned / "config.json").read_bytes() == (source / "config.json").read_bytes()
    trained = load_file(path / "model.safetensors")
    for name, array in after.items():
        assert array.tobytes() == trained[name].astype(array.dtype).tobytes()
    assert np.isfinite(logits_of_torch(causal_lm(tuned))).all()


def test_steps_are_adapters_of_peft(examples, tmp_path):
    example, lora = examples
    source, run = tmp_path / "source", tmp_path / "run"

    def look(step):
        path = step / "adapters"
        for fault in ost.verify(path, data=True):
            raise fault
        loaded = peft.PeftModel.from_pretrained(causal_lm(source), path).eval()
        return example.digest(ost.load(path, family=lora.adapter_family(source))), logits_of_torch(loaded)

    seen = seen_while_training(example, "train_lora.py", tmp_path, look)
    for (digest, _), expected in seen.values():
        assert digest == expected
    assert not list(run.glob("*/base*")), "a step has the base model in it"
    assert {path.parent.name for path in run.rglob("*.safetensors")} == {"adapters"}

    targets = nnx.split_state(nnx.state(nnx.eval_shape(lora.adapted_llama)), nnx.LoRAParam, nnx.Param)
    base = ost.load(source, targets[1], family=example.FAMILY)
    adapters = ost.load(run / str(STEPS) / "adapters", targets[0], family=lora.adapter_family(source))
    (_, by_peft), _ = seen[STEPS]
    by_nnx = logits_of_nnx(lora.adapted_llama, adapters, base)
    np.testing.assert_allclose(by_peft, by_nnx, rtol=1e-4, atol=1e-5)
    assert np.abs(by_peft - logits_of_torch(causal_lm(source))).max() > 0.01

    # Merged, in bfloat16 as the source: what PEFT merges, rounded.
    model = peft.PeftModel.from_pretrained(causal_lm(source), run / str(STEPS) / "adapters").merge_and_unload()
    after, before = (load_file(at / "model.safetensors") for at in (tmp_path / "merged", source))
    assert after.keys() == before.keys()
    merged = {name: array.float().numpy() for name, array in model.state_dict().items() if name in after}
    for name, array in after.items():
        assert array.dtype == before[name].dtype
        np.testing.assert_allclose(array.astype(np.float32), merged[name], rtol=2**-7, atol=1e-6)
    changed = {name.split(".")[-2] for name in after if after[name].tobytes() != before[name].tobytes()}
    assert changed == {"q_proj", "v_proj"}
