"""MaxText's Gemma 4: large models, dense or with experts, and small models.

Some layers have global attention, with larger heads, and the others local attention. In large models, layers come in
cycles of six, whose last is global and has no values: its keys serve as values. In small models, the last layers share
the keys and values of earlier ones, and there is an embedding for each layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from orbax_safetensors.mapping.families.stored import Config, Leaves, checked, completed, kernel, norm, text_config

_CYCLE = 6
_VISION = r"model\.(vision_tower|embed_vision)\..+"
_AUDIO = r"model\.(audio_tower|embed_audio)\..+"

# Published configs leave out what equals the defaults of `Gemma4TextConfig` and `Gemma4VisionConfig`.
_TEXT = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
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


def _text(config: Config) -> tuple[dict[str, Any], str]:
    """Return the language model's whole config, and the prefix of its stored names."""
    text, prefix = text_config(config, tied=True)
    c = dict(completed(text, **_TEXT))
    every_sixth = ["sliding_attention"] * (_CYCLE - 1) + ["full_attention"]
    kinds = list(c.get("layer_types") or (every_sixth * c["num_hidden_layers"])[: c["num_hidden_layers"]])
    kinds[-1] = "full_attention"  # whatever the config says
    return {**c, "layer_types": kinds}, prefix


def _is_small(config: Config) -> bool:
    c = {**_TEXT, **text_config(config)[0]}
    return bool(c["num_kv_shared_layers"] or c["hidden_size_per_layer_input"])


def _heads(c: Config, i: int) -> Mapping[str, int]:
    """Return the sizes of layer `i` that may differ from the other layers'."""
    if c.get("per_layer_config"):  # as `transformers` writes it
        sizes = {int(layer): sizes for layer, sizes in c["per_layer_config"].items()}.get(i, {})
        return checked({key: sizes[key] for key in ("head_dim", "num_key_value_heads") if key in sizes})
    if c["layer_types"][i] != "full_attention":
        return {}
    sizes = {"head_dim": c["global_head_dim"]}
    if c["attention_k_eq_v"] and c.get("num_global_key_value_heads") is not None:
        sizes["num_key_value_heads"] = c["num_global_key_value_heads"]
    return sizes


def _layer(h: str, c: Config, i: int) -> Leaves:
    """Return what all layers have except MLP and experts."""
    sized = {**c, **_heads(c, i)}
    parts = ["query", "key", "value", "out"]
    if i >= c["num_hidden_layers"] - c["num_kv_shared_layers"]:
        parts = ["query", "out"]
    elif c["attention_k_eq_v"] and c["layer_types"][i] == "full_attention":
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
    blocks = [layers[first : first + _CYCLE] for first in range(0, len(layers), _CYCLE)]
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
    projection = kernel("model.embed_vision.embedding_projection", (width, _text(config)[0]["hidden_size"]))
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
    c, prefix = _text(config)
    refuse(c, "attention_bias", "num_kv_shared_layers", "hidden_size_per_layer_input")
    require(c, attention_k_eq_v=True)
    full = [i for i, kind in enumerate(c["layer_types"]) if kind == "full_attention"]
    if full != list(range(_CYCLE - 1, c["num_hidden_layers"], _CYCLE)):
        raise MappingError(
            f"MaxText has global attention in the last layer of each {_CYCLE}, and config.json in layers {some(full)} "
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
    towers = multimodal({} if use_multimodal is False else _vision(config), _VISION, use_multimodal)
    return _model(c, decoder, vocab_size, prefix, **{**towers, "unused": [*towers["unused"], _AUDIO]})


def _small_layer(h: str, c: Config, i: int) -> Leaves:
    width, inner, per_layer = c["hidden_size"], c["intermediate_size"], c["hidden_size_per_layer_input"]
    if c["use_double_wide_mlp"] and i >= c["num_hidden_layers"] - c["num_kv_shared_layers"]:
        inner *= 2
    leaves = {**_layer(h, c, i), **under("mlp", mlp(h + "mlp", width, inner))}
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
    c, prefix = _text(config)
    refuse(c, "attention_bias", "enable_moe_block")
    require(c, attention_k_eq_v=False)
    layers = [_small_layer(f"{prefix}layers.{i}.", c, i) for i in range(c["num_hidden_layers"])]
    decoder = {**numbered("layers", layers), **_per_layer_embedder(prefix, c)}
    # Some checkpoints store keys and values for layers that have those of others.
    unused = [
        rf"{re.escape(prefix)}layers\.{i}\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
        for i in range(c["num_hidden_layers"] - c["num_kv_shared_layers"], c["num_hidden_layers"])
    ]
    unused += [_VISION, _AUDIO]
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
