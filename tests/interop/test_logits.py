"""The model of the first pages computes what `transformers` does with the same files."""

import numpy as np
import pytest

import orbax_safetensors as ost
from examples.qwen3 import logits
from tests.support import examples

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = np.arange(12)


def expected(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()


def test_logits(tmp_path):
    examples.make_models(tmp_path)
    params = ost.load(tmp_path / "qwen3", family="maxtext", dtype="float32")
    np.testing.assert_allclose(logits(params, TOKENS), expected(tmp_path / "qwen3"), rtol=1e-4, atol=1e-6)


def test_logits_with_a_head_of_their_own(tmp_path):
    """Large models do not tie them to the embedding."""
    small = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rope_theta=1e6, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(small).save_pretrained(tmp_path)
    params = ost.load(tmp_path, family="maxtext")
    np.testing.assert_allclose(logits(params, TOKENS), expected(tmp_path), rtol=1e-4, atol=1e-5)
