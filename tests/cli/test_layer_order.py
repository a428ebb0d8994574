"""The order of layers, for names of several conventions, in whatever order files have them."""

import pytest

from orbax_safetensors.cli.layer_order import by_layer

PARTS = ("input_layernorm", "mlp.up_proj", "self_attn.q_proj")
LAYERS = [f"model.layers.{layer}.{part}.weight" for layer in range(12) for part in PARTS]


def test_layers_have_their_parts_in_one_order():
    """That of the first that appears, as the tensors of a layer may be in two files."""
    names = ["h.1.b", "h.1.a", "h.0.a", "h.10.b", "h.0.b", "h.10.a"]
    assert by_layer(names, str) == ["h.0.b", "h.0.a", "h.1.b", "h.1.a", "h.10.b", "h.10.a"]


@pytest.mark.parametrize(
    "names",
    [
        ["model.embed_tokens.weight", *LAYERS, "model.norm.weight", "lm_head.weight"],
        ["wpe.weight", "wte.weight", "h.0.ln_1.bias", "h.0.mlp.bias", "h.2.ln_1.bias", "h.11.ln_1.bias", "ln_f.bias"],
        ["embed_in.weight", "layers.0.x", "layers.1.x", "final_layer_norm.x", "embed_out.weight"],
        ["token_embedder.embedding", "layers_0.x", "layers_2.x", "layers_10.x", "decoder_norm.scale", "logits_dense.k"],
        ["embeddings.cls", "encoder.layers.0.x", "pre_layernorm.x", "post_layernorm.x"],
        ["layers.0.experts.0.w1", "layers.0.experts.2.w1", "layers.0.experts.10.w1", "layers.1.experts.0.w1"],
    ],
)
def test_embeddings_are_first_and_norms_and_heads_last(names):
    assert by_layer(sorted(names), str) == names


def test_numbers_that_python_refuses_to_read_are_text():
    names = [f"layers.{'1' * 5000}.a", "layers.0.a"]
    assert set(by_layer(names, str)) == set(names)
