"""The page on saves: its examples run as they stand, on a small checkpoint in the place that they name."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import orbax_safetensors as ost
from tests.support import examples
from tests.support.maxtext_trees import stored
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "saving.md"


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_the_examples(tmp_path):
    examples.make_models(tmp_path)
    (tmp_path / "qwen3" / "tokenizer.json").write_text("{}")
    blocks = examples.python(PAGE)
    assert len(blocks) == 5
    names = {}
    for block in blocks:
        examples.run(block, tmp_path, names)
    for directory in ("new", "two"):
        saved = ost.open_checkpoint(tmp_path / directory)
        assert (len(saved.files), saved.metadata["format"]) == (1, "pt")
    assert names["again"]["embed"].sharding == names["tree"]["embed"].sharding
    assert names["again"]["step"] == 7
    source = stored(tmp_path / "qwen3")
    for directory in ("fine-tuned", "base"):
        saved = stored(tmp_path / directory)
        assert saved.keys() == source.keys()
        assert all(saved[name].tobytes() == array.tobytes() for name, array in source.items())
        assert (tmp_path / directory / "tokenizer.json").exists()
        assert (tmp_path / directory / "config.json").read_bytes() == (tmp_path / "qwen3" / "config.json").read_bytes()
    state = names["state"]
    assert all(
        np.asarray(state[name]).tobytes() == array.astype(np.float32).tobytes() for name, array in source.items()
    )
    assert jax.tree.map(np.shape, state["up"]) == {"lora_a": (3, 32, 4), "lora_b": (3, 4, 48)}
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sorted(adapter) == [
        f"base_model.model.model.layers.{n}.mlp.up_proj.lora_{part}.weight" for n in range(3) for part in "AB"
    ]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == names["config"] | {
        "base_model_name_or_path": str(tmp_path / "qwen3")
    }
    lora, again = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("qwen3-lora", "qwen3-lora-tuned")
    )
    assert {name: array.tobytes() for name, array in again.items()} == {
        name: array.tobytes() for name, array in lora.items()
    }
