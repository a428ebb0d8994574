"""The README's examples run as they stand, and it stays short."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from tests.support import examples
from tests.support.full_size import make
from tests.support.roots import ROOT
from tests.support.terminal import terminal

README = ROOT / "README.md"


def test_it_is_short():
    assert README.stat().st_size <= 7 * 1024


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_the_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples.make_models(tmp_path)
    names, restored = {}, []
    for block in examples.blocks(README, "sh", "python"):
        examples.run(block, tmp_path, names)
        if block.language == "python":
            restored.append(names["params"])
    assert restored[1] is restored[2]
    source = stored(tmp_path / "qwen3")
    gates = [source[f"model.layers.{layer}.mlp.gate_proj.weight"].T for layer in range(3)]
    for params, dtype in zip(restored[:2], ("bfloat16", "float32"), strict=True):
        kernel = params["params"]["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
        assert (kernel.sharding.spec, kernel.dtype) == (P(None, None, "model"), dtype)
        np.testing.assert_array_equal(kernel, np.stack(gates, axis=1))
    logits = names["logits"](restored[1], np.arange(5))  # `tests/interop/test_logits.py` looks at their values
    assert (logits.shape, logits.dtype) == ((5, 64), np.float32)
    for saved in (stored(tmp_path / "tuned"), stored(tmp_path / "back")):
        assert saved.keys() == source.keys()
        assert all(saved[name].tobytes() == array.tobytes() for name, array in source.items())
    assert (tmp_path / "qwen3-maxtext" / "_METADATA").exists()


def test_the_plan_prints_what_the_page_shows(tmp_path, monkeypatch):
    (tmp_path / "qwen3").mkdir()
    make("qwen3-0.6b-published", tmp_path / "qwen3")
    shown = terminal(monkeypatch, 120, "stdout")
    (command,) = (
        block.text for block in examples.blocks(README, "sh") if block.text.startswith("orbax-safetensors plan")
    )
    examples.run(examples.Block("sh", command), tmp_path, {})
    (block,) = examples.blocks(README, "text")
    assert [line for line in block.text.splitlines() if line != "..." and line not in shown.lines] == []


def stored(directory):
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}
