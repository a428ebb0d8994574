"""Directories that are linked: `transformers` loads the models that it saved there, and Orbax restores them."""

import pytest

import orbax_safetensors as ost
from tests.support.link_models import assert_same, read

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support.torch_bits import to_numpy  # noqa: E402

TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize(
    ("tree", "files", "beside"),
    [
        ({}, "one file", True),
        ({}, "several files", False),
        ({"family": "maxtext"}, "one file", False),
        ({"family": "maxtext"}, "several files", True),
    ],
)
def test_a_linked_directory_is_the_model(tree, files, beside, model, tmp_path):
    source = tmp_path / "model"
    model.save_pretrained(source, max_shard_size="10KB" if files == "several files" else "1GB")
    assert (source / "model.safetensors.index.json").exists() == (files == "several files")
    done = ost.link(source, None if beside else tmp_path / "link", **tree)
    assert done.made_bytes == 0
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(done.path, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(TOKENS).logits, model(TOKENS).logits)
    if not tree:
        assert_same(read(done.path), {name: to_numpy(tensor) for name, tensor in model.state_dict().items()})
