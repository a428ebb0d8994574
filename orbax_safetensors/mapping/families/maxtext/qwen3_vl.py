"""MaxText's Qwen3-VL, dense or with experts, and Qwen3-Omni: Qwen3 with towers for images and sounds.

The vision tower feeds several layers of the language model. MaxText does not stack these.
"""

from __future__ import annotations

from collections.abc import Mapping

from orbax_safetensors.mapping import Tree, tensor
from orbax_safetensors.mapping.families.maxtext.common import (
    Layer,
    biased_attention,
    joint_experts,
    model,
    multimodal,
    numbered,
    refuse,
    require_unscanned,
    under,
    unscanned_family,
    variants_with,
)
from orbax_safetensors.mapping.families.maxtext.qwen import (
    expert_sizes,
    qwen3_layer,
    qwen3_moe_layer,
    sparse_layer,
)
from orbax_safetensors.mapping.families.maxtext.qwen_vision import MergerNames, vision
from orbax_safetensors.mapping.families.stored import Config, Leaves, biased, biased_norm, checked, completed, kernel
from orbax_safetensors.mapping.family import Variant

_OMNI_MERGERS = MergerNames("ln_q", "mlp.0", "mlp.2", listed="merger_list")


def _text(config: Config, **defaults: int) -> Config:
    """Return the language model's config, completed. The whole model's says whether embeddings are tied."""
    text = config["text_config"]
    c = {**text, "tie_word_embeddings": config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))}
    refuse(c, "attention_bias")
    return completed(c, **defaults)


def _vl_towers(config: Config) -> Leaves:
    c = config.get("vision_config")
    return vision("model.visual.", c, "Qwen3VL") if c else {}


def _vl(config: Config, layer: Layer, vocab_size: int | None, use_multimodal: bool | None) -> Tree:
    c = _text(config, head_dim=128)
    prefix = "model.language_model."
    layers = [layer(f"{prefix}layers.{i}.", c) for i in range(c["num_hidden_layers"])]
    towers = multimodal(_vl_towers(config), r"model\.visual\..+", use_multimodal)
    return model(c, numbered("layers", layers), vocab_size, prefix=prefix, **towers)


def qwen3_vl(
    config: Config,
    *,
    scan_layers: bool = False,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    use_multimodal: bool | None = None,
) -> Tree:
    """Return the tree of Qwen3-VL. `use_multimodal` says whether it has the vision tower; if None, if stored."""
    require_unscanned(scan_layers)
    return _vl(config, qwen3_layer, vocab_size, use_multimodal)


def qwen3_vl_moe(
    config: Config,
    *,
    scan_layers: bool = False,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    use_multimodal: bool | None = None,
    transposed_experts: bool = False,
) -> Tree:
    """Return the tree of Qwen3-VL with experts. `use_multimodal` is as for the dense model.

    `transposed_experts` says whether the stored experts' last dimension is inputs. It is outputs in published files;
    `transformers` stores a model that it has made itself the other way around.
    """
    require_unscanned(scan_layers)

    def layer(h: str, c: Config) -> Leaves:
        count, width, inner = expert_sizes(c)
        experts = joint_experts(h + "mlp", count, width, inner, transposed=transposed_experts)
        return sparse_layer(h, c, {"gate.kernel": kernel(h + "mlp.gate", (width, count)), **experts})

    return _vl(config, layer, vocab_size, use_multimodal)


def _experts_as_stored(shapes: Mapping[str, tuple[int, ...]]) -> Variant:
    """Return whether experts are stored as [experts, 2 * inner, width] and [experts, width, inner]."""
    experts = "model.language_model.layers.0.mlp.experts."
    gate_up, down = shapes.get(f"{experts}gate_up_proj", ()), shapes.get(f"{experts}down_proj", ())
    if len(gate_up) != 3 or len(down) != 3:
        return {}
    return {"transposed_experts": gate_up[1] == 2 * down[2] and gate_up[2] == down[1]}


def _audio_layer(name: str, c: Config) -> Leaves:
    width, inner, heads = c["d_model"], c["encoder_ffn_dim"], c["encoder_attention_heads"]
    return {
        **under("input_layer_norm", biased_norm(f"{name}.self_attn_layer_norm", width)),
        **under("post_attention_layer_norm", biased_norm(f"{name}.final_layer_norm", width)),
        **under("self_attention_audio", biased_attention(f"{name}.self_attn", width, heads, out="out_proj")),
        **under("AudioMLP.wi", biased(f"{name}.fc1", (width, inner))),
        **under("AudioMLP.wo", biased(f"{name}.fc2", (inner, width))),
    }


def _convolution(name: str, inputs: int, outputs: int) -> Leaves:
    weight = tensor(f"{name}.weight", (outputs, inputs, 3, 3))
    return {"kernel": weight.transpose((2, 3, 1, 0)), "bias": tensor(f"{name}.bias", (outputs,))}


def _audio(prefix: str, c: Config) -> Leaves:
    """Return the tower for sounds and its projector. Three convolutions halve the spectrum, rounding up."""
    c = checked(c)
    width, channels = c["d_model"], c["downsample_hidden_size"]
    bins = -(-c["num_mel_bins"] // 8)
    encoder = {
        **under("conv2d1", _convolution(f"{prefix}conv2d1", 1, channels)),
        **under("conv2d2", _convolution(f"{prefix}conv2d2", channels, channels)),
        **under("conv2d3", _convolution(f"{prefix}conv2d3", channels, channels)),
        "conv_out.kernel": kernel(f"{prefix}conv_out", (channels * bins, width)),
        **numbered("layers", [_audio_layer(f"{prefix}layers.{i}", c) for i in range(c["encoder_layers"])]),
        **under("layernorm_post", biased_norm(f"{prefix}ln_post", width)),
    }
    projector = {
        **under("proj1", biased(f"{prefix}proj1", (width, width))),
        **under("proj2", biased(f"{prefix}proj2", (width, c["output_dim"]))),
    }
    return {
        **under("audio_encoder.Qwen3OmniAudioEncoder_0", encoder),
        **under("audio_encoder.Qwen3OmniAudioProjector_0", projector),
    }


def qwen3_omni(
    config: Config,
    *,
    scan_layers: bool = False,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    use_multimodal: bool | None = None,
    use_audio: bool | None = None,
) -> Tree:
    """Return the tree of Qwen3-Omni's thinker. MaxText has no place for the parts that speak.

    `use_multimodal` and `use_audio` say whether it has the towers for images and for sounds; if None, if stored.
    """
    require_unscanned(scan_layers)
    thinker = config["thinker_config"]
    c = _text(thinker)
    layers = [qwen3_moe_layer(f"thinker.model.layers.{i}.", c) for i in range(c["num_hidden_layers"])]
    eyes, ears = thinker.get("vision_config"), thinker.get("audio_config")
    images = vision("thinker.visual.", eyes, "Qwen3OmniMoe", _OMNI_MERGERS) if eyes else {}
    sounds = _audio("thinker.audio_tower.", ears) if ears else {}
    seen = multimodal(images, r"thinker\.visual\..+", use_multimodal)
    heard = multimodal(sounds, r"thinker\.audio_tower\..+", use_audio, "use_audio")
    return model(
        c,
        numbered("layers", layers),
        vocab_size,
        prefix="thinker.model.",
        beside={**seen["beside"], **heard["beside"]},
        unused=[*seen["unused"], *heard["unused"], r"(talker|code2wav)\..+"],
        optional=[*seen["optional"], *heard["optional"]],
    )


_VISION = variants_with(use_multimodal="vision_encoder.")

QWEN3_VL = unscanned_family("maxtext.qwen3_vl", ("Qwen3VLForConditionalGeneration",), qwen3_vl, variants=_VISION)
QWEN3_VL_MOE = unscanned_family(
    "maxtext.qwen3_vl_moe",
    ("Qwen3VLMoeForConditionalGeneration",),
    qwen3_vl_moe,
    variants=_VISION,
    stored_as=_experts_as_stored,
)
QWEN3_OMNI = unscanned_family(
    "maxtext.qwen3_omni",
    ("Qwen3OmniMoeForConditionalGeneration",),
    qwen3_omni,
    variants=variants_with(use_multimodal="vision_encoder.", use_audio="audio_encoder."),
)
