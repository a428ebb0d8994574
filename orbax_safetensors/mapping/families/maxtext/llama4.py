"""MaxText's Llama 4: layers in cycles of four, some or all of them with experts, and a tower for images.

Queries and keys are as stored: neither scaled nor in another order, as they are in MaxText's Llama 3.
"""

from __future__ import annotations

from orbax_safetensors.mapping import Tree, tensor
from orbax_safetensors.mapping.families.maxtext.common import (
    attention,
    biased_attention,
    family,
    in_cycles,
    joint_experts,
    layer_norms,
    mlp,
    model,
    multimodal,
    numbered,
    refuse,
    require,
    require_cycles,
    under,
    variants_with,
)
from orbax_safetensors.mapping.families.stored import (
    LANGUAGE_MODEL,
    Config,
    Leaves,
    biased,
    biased_norm,
    checked,
    completed,
    kernel,
)

_CYCLE = 4
# The defaults of `Llama4TextConfig` and `Llama4VisionConfig` that go with any sizes.
_TEXT = {"num_key_value_heads": 8, "head_dim": 128, "interleave_moe_layer_step": 1}
_VISION = {"num_channels": 3}


def _experts(h: str, c: Config) -> Leaves:
    count, width, inner = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    block = h + "feed_forward"
    return {
        **under("MoeBlock_0", joint_experts(block, count, width, inner, transposed=False)),
        "MoeBlock_0.gate.kernel": kernel(block + ".router", (width, count)),
        **under("shared_experts", mlp(block + ".shared_expert", width, inner)),
    }


def _layer(h: str, c: Config, *, sparse: bool) -> Leaves:
    dense = {} if sparse else mlp(h + "feed_forward", c["hidden_size"], c["intermediate_size_mlp"])
    return {
        **layer_norms(h, c),
        **under("self_attention", attention(h, c)),
        **(under("Llama4MoEBlock_0", _experts(h, c)) if sparse else under("mlp", dense)),
    }


def _vision_layer(name: str, c: Config) -> Leaves:
    width, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    block = "Llama4VisionMLP_0.vit_encoder_layer_mlp_fc"
    return {
        **under("input_layer_norm", biased_norm(f"{name}.input_layernorm", width)),
        **under("post_attention_layer_norm", biased_norm(f"{name}.post_attention_layernorm", width)),
        **under("self_attention_vision", biased_attention(f"{name}.self_attn", width, heads, out="o_proj")),
        **under(f"{block}1", biased(f"{name}.mlp.fc1", (width, inner))),
        **under(f"{block}2", biased(f"{name}.mlp.fc2", (inner, width))),
    }


def _vision(config: Config, text_width: int) -> Leaves:
    """Return the tower, whose last layers join neighbouring patches, and its projector."""
    c = checked({**_VISION, **config})
    width, joined, outputs = c["hidden_size"], c["projector_input_dim"], c["projector_output_dim"]
    patches = (c["image_size"] // c["patch_size"]) ** 2
    adapter = "Llama4VisionPixelShuffleMLP_0.pixel_shuffle_mlp.vit_pixel_shuffle_mlp_fc"
    layers = [_vision_layer(f"vision_model.model.layers.{i}", c) for i in range(c["num_hidden_layers"])]
    tower = {
        "class_embedding": tensor("vision_model.class_embedding", (width,)),
        "positional_embedding_vlm": tensor("vision_model.positional_embedding_vlm", (patches + 1, width)),
        "Llama4UnfoldConvolution_0.vit_unfold_linear.kernel": kernel(
            "vision_model.patch_embedding.linear", (c["num_channels"] * c["patch_size"] ** 2, width)
        ),
        **under("layernorm_pre", biased_norm("vision_model.layernorm_pre", width)),
        **under("layernorm_post", biased_norm("vision_model.layernorm_post", width)),
        **under("Llama4VisionEncoder_0", numbered("layers", layers)),
        f"{adapter}1.kernel": kernel("vision_model.vision_adapter.mlp.fc1", (c["intermediate_size"], joined)),
        f"{adapter}2.kernel": kernel("vision_model.vision_adapter.mlp.fc2", (outputs, outputs)),
    }
    return {
        **under("vision_encoder.Llama4VisionModel_0", tower),
        "vision_encoder.Llama4MultiModalProjector_0.vit_multi_modal_projector.kernel": kernel(
            "multi_modal_projector.linear_1", (c["vision_output_dim"], text_width)
        ),
    }


def llama4(
    config: Config,
    *,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    use_multimodal: bool | None = None,
) -> Tree:
    """Return the tree of Llama 4. `use_multimodal` says whether it has the vision tower; if None, if stored."""
    c = completed(config["text_config"], **_TEXT)
    refuse(c, "attention_bias")
    count, step = c["num_hidden_layers"], c["interleave_moe_layer_step"]
    if c.get("moe_layers"):
        require(c, moe_layers=list(range(step - 1, count, step)))
    if scan_layers:
        require_cycles(c, _CYCLE)
    prefix = LANGUAGE_MODEL
    layers = [_layer(f"{prefix}layers.{i}.", c, sparse=(i + 1) % step == 0) for i in range(count)]
    eyes = config.get("vision_config")
    return model(
        c,
        in_cycles(_CYCLE, layers, scan_layers, param_scan_axis),
        vocab_size,
        prefix=prefix,
        **multimodal(
            _vision(eyes, c["hidden_size"]) if eyes else {},
            r"(vision_model|multi_modal_projector)\..+",
            use_multimodal,
        ),
    )


LLAMA4 = family(
    "maxtext.llama4",
    ("Llama4ForConditionalGeneration",),
    llama4,
    variants=variants_with(use_multimodal="vision_encoder."),
)
