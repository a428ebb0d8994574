"""Tiny random models of `transformers`, of any type: configs are shrunk by the names of their numbers.

    model = tiny_models.make("llama", Path("/tmp/llama"))

Widths are divided, counts have a limit, and a list with an entry for each layer is cut with the layers. If no class
takes such a config, the next of `SIZES` is tried, and the default config last. `_ARGUMENTS` has what some types need.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

MOST_PARAMETERS = 50_000_000  # of a model; 200 MB in float32
# What widths are divided by and how many layers there are at most, in the order of the attempts.
SIZES = ((16, 2), (16, 6), (8, 2), (4, 2), (4, 12), (2, 2), (1, 2))
# What a tensor's dimensions follow from. All are divided alike, so that they still fit each other.
_WIDTH = re.compile(
    r"(.*_)?(size|sizes|dim|dims|channels|width|features|d_model|d_ff|d_kv|d_inner|d_head|d_latents|headdim|n_embd|hidden"
    r"|rank|n_filters|num_filters|groups|query_pre_attn_scalar)"
)
# Names that match, too, but are of images, sounds or convolutions, or are numbers of things.
_NO_WIDTH = re.compile(
    r".*(vocab|image|patch|kernel|window|stride|chunk|batch|input|group(?!s)|block|grid|tile|state_|pool|codebook_size|beam|crop"
    r"|num_(?!filters|groups)|max_|context|temporal|scale|pretrain|merge|cache|ratio|position|audio_channels|in_chan).*"
)
_LAYERS = re.compile(r"(.*_)?(layers|n_layer|depth|depths|num_blocks|layers_per_stack|layers_per_block|num_res_blocks)")
_INDICES = re.compile(r".*(index|indices|idx|indexes|_layer_ids|_feature_layer)")
# The most that a number may be; the first pattern that matches counts.
_LIMITS = (
    (re.compile(r"(.*_)?vocab(_size)?(_.*)?|num_embeddings|.*_vocab_.*"), 128),
    (re.compile(r".*(kv_shared|nextn_predict|adapter)_layers"), 1),
    (re.compile(r"(.*_)?(num|n)_(.*_)?experts|moe_num_experts|zero_expert_num"), 8),
    (re.compile(r".*experts_per_tok(en)?|(?!index).*top_?k(_.*)?|n_group|num_expert_group"), 2),
    (re.compile(r"topk_group"), 1),
    (
        re.compile(
            r"max_.*|n_positions|n_ctx|context_size|.*_positions|.*num_position_embeddings|.*position_embedding_size"
        ),
        64,
    ),
)
_TOKEN = re.compile(r".*token(_id|_index|_ids)?|(pad|bos|eos|sep|mask|unk)_(id|index|idx)|.*_token_idx|.*_pad_id")
# Layers of one kind, where there should be some of another.
_FIRST_LAYERS = re.compile(r".*dense_layers|first_k_dense_replace")
# Classes with a head, and so with all tensors of a model, those of several towers first.
_HEADS = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForPreTraining", "ForMaskedLM")
# Derived anew from the number of layers.
_DERIVED = {"out_features", "out_indices", "stage_names", "transformers_version", "_out_features", "_out_indices"}


def types() -> list[str]:
    """Return all model types that the installed `transformers` has a class for."""
    return [model_type for model_type in configuration_auto.CONFIG_MAPPING_NAMES if classes(model_type)]


@functools.cache
def classes(model_type: str) -> tuple[str, ...]:
    """Return the names of the classes of a model type, those with most of its tensors first."""
    found = {}
    for mapping in sorted(name for name in vars(modeling_auto) if name.endswith("_MAPPING_NAMES")):
        names = getattr(modeling_auto, mapping).get(model_type, ())
        if mapping != "CONFIG_MAPPING_NAMES":
            found.update(dict.fromkeys((names,) if isinstance(names, str) else names))
    return tuple(sorted(found, key=_place))


def _place(name: str) -> int:
    place = next((place for place, head in enumerate(_HEADS) if name.endswith(head)), len(_HEADS))
    return place + (place == len(_HEADS) and name.endswith(("Model", "Backbone")))


def shrunk(config: Mapping[str, Any], divisor: int, layers: int) -> dict[str, Any]:
    """Return a config with small numbers, and the configs in it likewise."""
    counts = {value for key, value in config.items() if _LAYERS.fullmatch(str(key)) and isinstance(value, int)}
    out: dict[Any, Any] = {}
    for key, value in config.items():
        if key in _DERIVED:
            continue
        if not isinstance(key, str):
            out[key] = value
        elif isinstance(value, dict) and not key.endswith(("2id", "2label")):
            entries = {at: entry for at, entry in value.items() if not _is_of_layer(at, entry) or int(at) < layers}
            out[key] = shrunk(entries, divisor, layers)
        elif isinstance(value, list) and value and not isinstance(value[0], dict):
            if len(value) in counts and len(value) > layers:
                # Of two layers, each is of another kind if there are several; of more, they keep their pattern.
                value = value[:layers] if layers > 2 else [value[0], value[-1]]
            if key.endswith("_section"):  # dimensions of a head, in parts
                total = sum(value) // divisor
                value = [total - (len(value) - 1) * (total // len(value)), *[total // len(value)] * (len(value) - 1)]
            out[key] = [_small(key, entry, divisor, layers) for entry in value]
            if _INDICES.fullmatch(key):
                out[key] = sorted(set(out[key]))
        else:
            out[key] = _small(key, value, divisor, layers)
    return {**out, **_heads(out), **_ARGUMENTS.get(config.get("model_type", ""), {})}


def _is_of_layer(key: Any, entry: Any) -> bool:
    return str(key).isdigit() and isinstance(entry, dict)


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Return a number of heads of an even size, if that follows from the width and the config's number has none."""
    key = next((key for key in ("num_heads", "num_attention_heads") if isinstance(config.get(key), int)), None)
    width = config.get("hidden_size") or config.get("embed_dim")
    if key is None or not isinstance(width, int) or config.keys() & {"head_dim", "num_key_value_heads"}:
        return {}
    return {key: gcd(config[key], width // 2)}


def _small(key: str, value: Any, divisor: int, layers: int) -> Any:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return value
    for pattern, most in _LIMITS:
        if pattern.fullmatch(key):
            return min(value, most)
    if _TOKEN.fullmatch(key):
        return value % 100
    if _INDICES.fullmatch(key) or _FIRST_LAYERS.fullmatch(key):
        return min(value, layers - 1)
    if _LAYERS.fullmatch(key):
        return min(value, layers)
    if _WIDTH.fullmatch(key) and not _NO_WIDTH.fullmatch(key) and value >= 32:
        return value // divisor if value % divisor == 0 else -(-value // divisor // 8) * 8
    return value


# What configs of a type have to be told, also inside others, because their defaults do not suffice for a model.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "deepseek_v4": {  # as published: the defaults of `transformers` are in another order
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 2
        + ["compressed_sparse_attention", "heavily_compressed_attention"]
        + ["compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 2,
    },
    "deepseek_ocr2_text": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "mlp_layer_types": ["dense"] * 2},
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dory": {"num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "informer": {"prediction_length": 4},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 8},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
    "qwen3_omni_moe": {"enable_audio_output": False},  # the config of the talker lacks two sizes
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": {"prediction_length": 4},
}


class NotMade(Exception):
    """No model of this type can be made here; the text says why."""


def make(
    model_type: str,
    directory: Path,
    names: Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> Any:
    """Return a tiny model of a type, of the first of its classes (or of `names`) that can be made and saved.

    It has saved itself to `directory`, in several files. `sizes` are pairs of a divisor for widths and the most layers;
    the first pair that the class takes counts. Raises `NotMade`.
    """
    reasons: list[str] = []
    for config in _configs(model_type, sizes, reasons):
        for name in names or classes(model_type):
            try:
                model_class = getattr(transformers, name)
                with torch.device("meta"):
                    size = sum(tensor.numel() for tensor in model_class(config).state_dict().values())
                if size > MOST_PARAMETERS:
                    reasons.append(f"{name}: {size} parameters")
                    continue
                torch.manual_seed(0)
                model = model_class._from_config(config, dtype=dtype).eval()
                with torch.no_grad():
                    for tensor in model.parameters():
                        tensor.normal_(std=0.1)
                model.save_pretrained(directory, max_shard_size=max(1, model.get_memory_footprint() // 2))
                return model
            except (Exception, SystemExit) as error:
                shutil.rmtree(directory, ignore_errors=True)
                reasons.append(text(name, error))
    raise NotMade(" | ".join(dict.fromkeys(reasons)))


def _configs(model_type: str, sizes: Sequence[tuple[int, int]], reasons: list[str]) -> Iterator[Any]:
    try:
        config_class = configuration_auto.CONFIG_MAPPING[model_type]
        default = config_class(**_ARGUMENTS.get(model_type, {}))
    except Exception as error:
        raise NotMade(text(configuration_auto.CONFIG_MAPPING_NAMES[model_type], error)) from error
    for divisor, layers in sizes:
        try:
            yield config_class.from_dict(shrunk(default.to_dict(), divisor, layers))
        except Exception as error:
            reasons.append(text(f"divided by {divisor}, {layers} layers", error))
    yield default


def text(what: str, error: BaseException) -> str:
    """Return what an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{what}: {type(error).__name__}: {' '.join(lines)[:200]}"
