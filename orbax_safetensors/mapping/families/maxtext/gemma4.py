"""MaxText's Gemma 4: large models, dense or with experts, and small models.

In large models, layers come in cycles of six, whose last is global and has no values.
"""

from __future__ import annotations

import re
from math import sqrt
from typing import Any

import numpy as np

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.names import some
from orbax_safetensors.mapping import Tree, tensor
from orbax_safetensors.mapping.families.maxtext.common import (
    attention,
    family,
    head_norms,
    joint_experts,
    mlp,
    model,
    multimodal,
    numbered,
    refuse,
    require,
    require_unscanned,
    sandwich_norms,
    stacked,
    under,
    unscanned_family,
    variants_with,
)
from orbax_safetensors.mapping.families.stored import Config, Leaves, checked, kernel, norm, text_config
from orbax_safetensors.mapping.families.stored_gemma4 import (
    AUDIO,
    CYCLE,
    DEFAULTS,
    VISION,
    has_values,
    head_sizes,
    is_global,
    mlp_size,
    shares,
    whole_text_config,
)

# Published configs leave out what equals the defaults of `Gemma4VisionConfig`.
_TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "standardize": False,
}


def _is_small(config: Config) -> bool:
    c = {**DEFAULTS, **text_config(config)[0]}
    return bool(c["num_kv_shared_layers"] or c["hidden_size_per_layer_input"])


def _layer(h: str, c: Config, i: int) -> Leaves:
    """Return what all layers have except MLP and experts."""
    sized = {**c, **head_sizes(c, i)}
    parts = ["query", "key", "value", "out"]
    if shares(c, i):
        parts = ["query", "out"]
    elif not has_values(c, i):
        parts.remove("value")
    heads = {**attention(h, sized, parts), **head_norms(h, sized, [part for part in ("query", "key") if part in parts])}
    return {
        **{f"{name}.scale": view for name, view in sandwich_norms(h, c).items()},
        **under("self_attention", heads),
        "layer_scalar": tensor(h + "layer_scalar", (1,)),
    }


def _dense(h: str, c: Config) -> Leaves:
    return mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])


def _sparse(h: str, c: Config) -> Leaves:
    """Return routed experts, and the MLP beside them, which MaxText calls shared."""
    width, count = c["hidden_size"], c["num_experts"]
    routed = {
        "gate.kernel": kernel(h + "router.proj", (width, count)),
        "per_expert_scale": tensor(h + "router.per_expert_scale", (count,)),
        **joint_experts(h.removesuffix("."), count, width, c["moe_intermediate_size"], transposed=True),
    }
    norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    return {
        **under("moe_block.shared_experts", _dense(h, c)),
        **under("moe_block.MoeBlock_0", routed),
        "pre_forward_scale_2": tensor(h + "router.scale", (width,)),
        **{f"{name}.scale": norm(h + name, width) for name in norms},
    }


def _in_blocks(layers: list[Leaves], axis: int) -> Leaves:
    """Return layers in cycles: the global layers stacked, and the local ones of each cycle, then all cycles."""
    blocks = [layers[first : first + CYCLE] for first in range(0, len(layers), CYCLE)]
    return {
        **under("local_layers", stacked([stacked(block[:-1], axis) for block in blocks], axis)),
        **under("global_layer", stacked([block[-1] for block in blocks], axis)),
    }


def _model(c: Config, decoder: Leaves, vocab_size: int | None, prefix: str, **more: Any) -> Tree:
    return model(c, decoder, vocab_size, prefix=prefix, factor=float(np.float32(sqrt(c["hidden_size"]))), **more)


def _vision(config: Config) -> Leaves:
    """Return the vision tower and its projector; {} if the config has none."""
    if not config.get("vision_config"):
        return {}
    c = checked({**_TOWER, **config["vision_config"]})
    refuse(c, "use_clipped_linears", "attention_bias")
    require(c, standardize=True)
    tower, width = "model.vision_tower.", c["hidden_size"]
    positions = tensor(tower + "patch_embedder.position_embedding_table", (2, c["position_embedding_size"], width))

    def layer(h: str) -> Leaves:
        norms = sandwich_norms(h, c).items()
        return {
            **under("attention", {**attention(h, c, linear=".linear"), **head_norms(h, c)}),
            **{f"{name.replace('self_attention', 'attention')}.scale": view for name, view in norms},
            **under("mlp", mlp(h + "mlp", width, c["intermediate_size"], linear=".linear")),
        }

    encoder = {
        "vision_entry.input_projection.kernel": kernel(
            tower + "patch_embedder.input_proj", (3 * c["patch_size"] ** 2, width)
        ),
        "vision_entry.pos_emb_param": positions.transpose((1, 0, 2)),
        "std_scale": tensor(tower + "std_scale", (width,)),
        "std_bias": tensor(tower + "std_bias", (width,)),
        **numbered("layer", [layer(f"{tower}encoder.layers.{i}.") for i in range(c["num_hidden_layers"])]),
    }
    projection = kernel("model.embed_vision.embedding_projection", (width, whole_text_config(config)[0]["hidden_size"]))
    return {
        **under("vision_encoder.Gemma4VisionEncoderLayer_0", encoder),
        "vision_encoder.Gemma4VisionProjector_0.projection.kernel": projection,
    }


def gemma4(
    config: Config,
    *,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    use_multimodal: bool | None = None,
) -> Tree:
    """Return the tree of a large Gemma 4. `use_multimodal` says whether it has the vision tower; if None, if stored."""
    c, prefix = whole_text_config(config)
    refuse(c, "attention_bias", "num_kv_shared_layers", "hidden_size_per_layer_input")
    require(c, attention_k_eq_v=True)
    full = [i for i in range(c["num_hidden_layers"]) if is_global(c, i)]
    if full != list(range(CYCLE - 1, c["num_hidden_layers"], CYCLE)):
        raise MappingError(
            f"MaxText has global attention in the last layer of each {CYCLE}, and config.json in layers {some(full)} "
            f"of {c['num_hidden_layers']}, counted from 0"
        )
    feed_forward = _sparse if c["enable_moe_block"] else _dense
    layers = []
    for i in range(c["num_hidden_layers"]):
        h = f"{prefix}layers.{i}."
        layers.append({**_layer(h, c, i), **under("mlp", feed_forward(h, c))})
    if scan_layers:
        decoder = under("scanned_blocks", _in_blocks(layers, param_scan_axis))
    else:
        decoder = numbered("layers", layers)
    towers = multimodal({} if use_multimodal is False else _vision(config), VISION, use_multimodal)
    return _model(c, decoder, vocab_size, prefix, **{**towers, "unused": [*towers["unused"], AUDIO]})


def _small_layer(h: str, c: Config, i: int) -> Leaves:
    width, per_layer = c["hidden_size"], c["hidden_size_per_layer_input"]
    leaves = {**_layer(h, c, i), **under("mlp", mlp(h + "mlp", width, mlp_size(c, i)))}
    if not per_layer:
        return leaves
    return {
        **leaves,
        "per_layer_input_gate.kernel": kernel(h + "per_layer_input_gate", (width, per_layer)),
        "per_layer_projection.kernel": kernel(h + "per_layer_projection", (per_layer, width)),
        "post_per_layer_input_norm.scale": norm(h + "post_per_layer_input_norm", width),
    }


def _per_layer_embedder(prefix: str, c: Config) -> Leaves:
    per_layer = c["hidden_size_per_layer_input"]
    if not per_layer:
        return {}
    joined = c["num_hidden_layers"] * per_layer
    embedding = tensor(f"{prefix}embed_tokens_per_layer.weight", (c["vocab_size_per_layer_input"], joined))
    return {
        "per_layer_embedder.embed_tokens_per_layer": embedding,
        "per_layer_embedder.per_layer_model_projection.kernel": kernel(
            f"{prefix}per_layer_model_projection", (c["hidden_size"], joined)
        ),
        "per_layer_embedder.per_layer_projection_norm.scale": norm(f"{prefix}per_layer_projection_norm", per_layer),
    }


def gemma4_small(
    config: Config, *, scan_layers: bool = False, param_scan_axis: int = 1, vocab_size: int | None = None
) -> Tree:
    """Return the tree of a small Gemma 4's language model, whose layers MaxText does not stack."""
    require_unscanned(scan_layers)
    c, prefix = whole_text_config(config)
    refuse(c, "attention_bias", "enable_moe_block")
    require(c, attention_k_eq_v=False)
    layers = [_small_layer(f"{prefix}layers.{i}.", c, i) for i in range(c["num_hidden_layers"])]
    decoder = {**numbered("layers", layers), **_per_layer_embedder(prefix, c)}
    # Some checkpoints store keys and values for layers that have those of others.
    unused = [
        rf"{re.escape(prefix)}layers\.{i}\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
        for i in range(c["num_hidden_layers"])
        if shares(c, i)
    ]
    unused += [VISION, AUDIO]
    return _model(c, decoder, vocab_size, prefix, unused=unused)


_ARCHITECTURES = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")
GEMMA4 = family(
    "maxtext.gemma4",
    _ARCHITECTURES,
    gemma4,
    applies_to=lambda config: not _is_small(config),
    variants=variants_with(use_multimodal="vision_encoder."),
)
GEMMA4_SMALL = unscanned_family("maxtext.gemma4_small", _ARCHITECTURES, gemma4_small, applies_to=_is_small)
