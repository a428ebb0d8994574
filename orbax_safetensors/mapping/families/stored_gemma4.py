"""Gemma 4's config, as families of all conventions read it.

Some layers have global attention, with larger heads, and the others local attention. In large models, global layers
have no values: their keys serve as values. In small models, the last layers share the keys and values of earlier ones,
and there is an embedding for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping.families.stored import Config, checked, completed, text_config

VISION = r"model\.(vision_tower|embed_vision)\..+"
AUDIO = r"model\.(audio_tower|embed_audio)\..+"
CYCLE = 6  # layers; the last of them is global if the config does not say which are

# Published configs leave out what equals the defaults of `Gemma4TextConfig`.
DEFAULTS = {
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


def whole_text_config(config: Config) -> tuple[dict[str, Any], str]:
    """Return the language model's whole config, with its `layer_types`, and the prefix of its stored names."""
    text, prefix = text_config(config, tied=True)
    c = dict(completed(text, **DEFAULTS))
    every_sixth = ["sliding_attention"] * (CYCLE - 1) + ["full_attention"]
    kinds = list(c.get("layer_types") or (every_sixth * c["num_hidden_layers"])[: c["num_hidden_layers"]])
    if len(kinds) != c["num_hidden_layers"]:
        raise MappingError(
            f"config.json: expected layer_types for {c['num_hidden_layers']} layers, as num_hidden_layers says, found "
            f"{len(kinds)} of them"
        )
    kinds[-1] = "full_attention"  # whatever the config says
    return {**c, "layer_types": kinds}, prefix


def head_sizes(c: Config, i: int) -> Mapping[str, int]:
    """Return the sizes of layer `i` that may differ from the other layers'."""
    if c.get("per_layer_config"):  # as `transformers` writes it
        sizes = {int(layer): sizes for layer, sizes in c["per_layer_config"].items()}.get(i, {})
        return checked({key: sizes[key] for key in ("head_dim", "num_key_value_heads") if key in sizes})
    if not is_global(c, i):
        return {}
    sizes = {"head_dim": c["global_head_dim"]}
    if c["attention_k_eq_v"] and c.get("num_global_key_value_heads") is not None:
        sizes["num_key_value_heads"] = c["num_global_key_value_heads"]
    return sizes


def is_global(c: Config, i: int) -> bool:
    """Return whether layer `i` has global attention."""
    return bool(c["layer_types"][i] == "full_attention")


def has_values(c: Config, i: int) -> bool:
    """Return whether layer `i` has values, not keys that serve as values."""
    return not (c["attention_k_eq_v"] and is_global(c, i))


def shares(c: Config, i: int) -> bool:
    """Return whether layer `i` has the keys and values of an earlier one."""
    return bool(i >= c["num_hidden_layers"] - c["num_kv_shared_layers"])


def mlp_size(c: Config, i: int) -> int:
    """Return the hidden size of the MLP of layer `i`."""
    wide = c["use_double_wide_mlp"] and shares(c, i)
    return int(c["intermediate_size"]) * (2 if wide else 1)
