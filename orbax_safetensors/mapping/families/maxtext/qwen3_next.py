"""MaxText's Qwen3-Next and Qwen3.5 with experts: cycles of layers with linear attention, the last with full attention.

All layers have routed experts and a shared expert. Qwen3.5 stores the same layers differently, and has a tower for
images. Layers of multi-token prediction are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from orbax_safetensors.mapping import Tree, View, concatenate, tensor
from orbax_safetensors.mapping.families.maxtext.common import (
    Layer,
    attention,
    experts,
    family,
    head_norms,
    in_cycles,
    joint_experts,
    mlp,
    model,
    multimodal,
    refuse,
    require_cycles,
    under,
    variants_with,
)
from orbax_safetensors.mapping.families.maxtext.qwen import expert_sizes
from orbax_safetensors.mapping.families.maxtext.qwen_vision import vision
from orbax_safetensors.mapping.families.stored import Config, Leaves, completed, kernel, norm, text_config
from orbax_safetensors.mapping.family import Variant

_PREDICTION = r"mtp\..+"
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4}


def _cycle(c: Config) -> int:
    """Return the length of a cycle, whose last layer has full attention."""
    if c.get("layer_types"):
        return 1 + list(c["layer_types"]).index("full_attention")
    length: int = c["full_attention_interval"]
    return length


def _full_attention(h: str, c: Config) -> Leaves:
    """Return attention whose queries have an output gate beside them in each head."""
    width, heads, size = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    return {
        "query.kernel": kernel(h + "self_attn.q_proj", (width, heads, 2 * size)),
        **attention(h, c, ("key", "value")),
        "out.kernel": kernel(h + "self_attn.o_proj", (heads * size, width)),
        **head_norms(h, c),
    }


def _linear_sizes(c: Config) -> tuple[int, int, int]:
    """Return the number of key heads, and the widths of all keys and of all values."""
    groups, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    return groups, groups * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]


def _joint_projections(h: str, c: Config) -> Leaves:
    """Return what goes into linear attention as Qwen3-Next stores it, by heads of keys."""
    width, (_, keys, values) = c["hidden_size"], _linear_sizes(c)
    return {
        "in_proj_qkvz.kernel": kernel(h + "linear_attn.in_proj_qkvz", (width, 2 * keys + 2 * values)),
        "in_proj_ba.kernel": kernel(h + "linear_attn.in_proj_ba", (width, 2 * c["linear_num_value_heads"])),
    }


def _by_heads(views: list[View], heads: int) -> View:
    """Return the kernel whose outputs are the first head of each of `views`, the second of each, and so on."""
    width = views[0].shape[1]
    return concatenate([view.reshape((heads, -1, width)) for view in views], 1).reshape((-1, width)).T


def _separate_projections(h: str, c: Config) -> Leaves:
    """Return what goes into linear attention as Qwen3.5 stores it: all queries, all keys and so on."""
    width, heads, (groups, keys, values) = c["hidden_size"], c["linear_num_value_heads"], _linear_sizes(c)
    qkv = tensor(h + "linear_attn.in_proj_qkv.weight", (2 * keys + values, width))
    parts = [qkv.slice(rows) for rows in (slice(keys), slice(keys, 2 * keys), slice(2 * keys, None))]
    z, b, a = (
        tensor(f"{h}linear_attn.in_proj_{part}.weight", (size, width))
        for part, size in (("z", values), ("b", heads), ("a", heads))
    )
    return {"in_proj_qkvz.kernel": _by_heads([*parts, z], groups), "in_proj_ba.kernel": _by_heads([b, a], groups)}


def _linear_attention(h: str, c: Config, projections: Layer) -> Leaves:
    width, heads, (_, keys, values) = c["hidden_size"], c["linear_num_value_heads"], _linear_sizes(c)
    conv = tensor(h + "linear_attn.conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"]))
    return {
        **projections(h, c),
        "conv1d.kernel": conv.T,
        "A_log": tensor(h + "linear_attn.A_log", (heads,)),
        "dt_bias": tensor(h + "linear_attn.dt_bias", (heads,)),
        "norm.rms_norm.scale": norm(h + "linear_attn.norm", c["linear_value_head_dim"]),
        "out_proj.kernel": kernel(h + "linear_attn.out_proj", (values, width)),
    }


def _separate_experts(h: str, c: Config) -> Leaves:
    return experts(h + "mlp", *expert_sizes(c))


def _joint_experts(h: str, c: Config) -> Leaves:
    count, width, inner = expert_sizes(c)
    return {
        "gate.kernel": kernel(h + "mlp.gate", (width, count)),
        **joint_experts(h + "mlp", count, width, inner, transposed=True),
    }


def _decoder(prefix: str, c: Config, scan_layers: bool, axis: int, projections: Layer, routed: Layer) -> Leaves:
    """Return all layers, with the `projections` of linear attention and the `routed` experts."""
    refuse(c, "attention_bias")
    width, cycle = c["hidden_size"], _cycle(c)
    if scan_layers:
        require_cycles(c, cycle)
    layers = []
    for i in range(c["num_hidden_layers"]):
        h = f"{prefix}layers.{i}."
        full = i % cycle == cycle - 1
        heads = under("attention", _full_attention(h, c)) if full else _linear_attention(h, c, projections)
        block = {
            **under("routed_experts", routed(h, c)),
            **under("shared_expert", mlp(h + "mlp.shared_expert", width, c["shared_expert_intermediate_size"])),
            "shared_expert_gate.kernel": kernel(h + "mlp.shared_expert_gate", (width, 1)),
        }
        layers.append(
            {
                "input_layernorm.scale": norm(h + "input_layernorm", width),
                "post_attention_layernorm.scale": norm(h + "post_attention_layernorm", width),
                **under("attention", heads),
                **under("mlp", block),
            }
        )
    return in_cycles(cycle, layers, scan_layers, axis, name="layer")


def qwen3_next(
    config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None
) -> Tree:
    """Return the tree of Qwen3-Next. If scanned, layers at the same place of a cycle are stacked."""
    c = completed(config, **_DEFAULTS)
    decoder = _decoder("model.", c, scan_layers, param_scan_axis, _joint_projections, _separate_experts)
    return model(c, decoder, vocab_size, unused=[_PREDICTION])


def qwen3_5(
    config: Config,
    *,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    use_multimodal: bool | None = None,
    separate_experts: bool = False,
) -> Tree:
    """Return the tree of Qwen3.5 with experts. `use_multimodal` says whether it has the tower; if None, if stored.

    `separate_experts` says whether experts are stored one by one, as `transformers` does, and not together, as in
    published files.
    """
    text, prefix = text_config(config)
    c = completed(text, **_DEFAULTS)
    routed = _separate_experts if separate_experts else _joint_experts
    decoder = _decoder(prefix, c, scan_layers, param_scan_axis, _separate_projections, routed)
    images = config.get("vision_config")
    tower = vision("model.visual.", images, "Qwen3_5Moe") if images else {}
    towers = multimodal(tower, r"model\.visual\..+", use_multimodal)
    return model(c, decoder, vocab_size, prefix=prefix, **{**towers, "unused": [*towers["unused"], _PREDICTION]})


def _experts_as_stored(shapes: Mapping[str, tuple[int, ...]]) -> Variant:
    first = "layers.0.mlp.experts.0.gate_proj.weight"
    return {"separate_experts": f"model.language_model.{first}" in shapes or f"model.{first}" in shapes}


QWEN3_NEXT = family("maxtext.qwen3_next", ("Qwen3NextForCausalLM",), qwen3_next)
QWEN3_5 = family(
    "maxtext.qwen3_5",
    ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    qwen3_5,
    variants=variants_with(use_multimodal="vision_encoder."),
    stored_as=_experts_as_stored,
)
