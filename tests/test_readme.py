"""The README's examples run as they stand, and it stays short."""

import re

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
    assert README.stat().st_size <= 5.5 * 1000


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_the_examples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    examples.make_models(tmp_path)
    names, restored, printed = {}, [], ""
    for block in examples.blocks(README, "sh", "python"):
        examples.run(block, tmp_path, names)
        if block.language == "python":
            restored.append(names["params"])
            printed += capsys.readouterr().out
    source = stored(tmp_path / "qwen3")
    gates = [source[f"model.layers.{layer}.mlp.gate_proj.weight"].T for layer in range(3)]
    for params, dtype in zip(restored, ("bfloat16", "float32", "float32"), strict=True):
        kernel = params["params"]["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
        assert (kernel.sharding.spec, kernel.dtype) == (P(None, None, "model"), dtype)
        np.testing.assert_array_equal(kernel, np.stack(gates, axis=1))
    tuned = stored(tmp_path / "tuned")
    assert tuned.keys() == source.keys()
    assert all(tuned[name].tobytes() == array.tobytes() for name, array in source.items())
    for made in ("qwen3-maxtext", "maxtext/0/items"):
        assert (tmp_path / made / "_METADATA").exists()
    # `tests/interop/test_logits.py` compares all of them with those of `transformers`.
    shown, _ = examples.blocks(README, "text")
    np.testing.assert_allclose(numbers(printed), numbers(shown.text), atol=0.0011)


def test_the_plan_prints_what_the_page_shows(tmp_path, monkeypatch):
    (tmp_path / "qwen3").mkdir()
    make("qwen3-0.6b-published", tmp_path / "qwen3")
    shown = terminal(monkeypatch, 120, "stdout")
    (command,) = (
        block.text for block in examples.blocks(README, "sh") if block.text.startswith("orbax-safetensors plan")
    )
    examples.run(examples.Block("sh", command), tmp_path, {})
    _, block = examples.blocks(README, "text")
    assert [line for line in block.text.splitlines() if line != "..." and line not in shown.lines] == []


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+\.\d*", text)]


def stored(directory):
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}
