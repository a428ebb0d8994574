"""`config.json`, which says what model a checkpoint's files are of: read, or made of what a caller passes."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.errors import MappingError
from orbax_safetensors.format import strict_json
from orbax_safetensors.format.header import shown
from orbax_safetensors.storage.store import File, read_small

CONFIG_NAME = "config.json"
# Of a PEFT adapter, whose tensors are in `layout.ADAPTER_NAME`.
ADAPTER_CONFIG_NAME = "adapter_config.json"
# Configs are a few kilobytes. What is much longer is something else.
_MAX_CONFIG_BYTES = 4 * 2**20

# Of NVIDIA ModelOpt, of GPTQ's programs and of AutoRound, which say how tensors are quantised.
_MODELOPT_NAME, _GPTQ_NAME = "hf_quant_config.json", "quantize_config.json"
_AUTOROUND_NAME = "quantization_config.json"
QUANTIZATION_NAMES = (_MODELOPT_NAME, _GPTQ_NAME, _AUTOROUND_NAME)

# The names of a model's dtype, that of newer versions of `transformers` first.
DTYPE_KEYS = ("dtype", "torch_dtype")
# What a model computes in; a config may say anything.
_FLOATS = ("bfloat16", "float16", "float32", "float64")

# The keys of `transformers`, of `compressed-tensors` in older files, and of MLX.
_MLX_KEY = "quantization"
QUANTIZATION_KEYS = ("quantization_config", "compression_config", _MLX_KEY)


def as_config(config: Any) -> dict[str, Any] | None:
    """Return a config that a caller passes to a save as the content of `config.json`.

    Raises `MappingError` if it is neither a dict that JSON can hold nor an object whose `to_dict` returns one.
    """
    if config is None:
        return None
    if isinstance(config, type):
        raise MappingError(f"config: expected an instance, found the class {config.__name__}: pass an instance of it")
    if not hasattr(config, "to_dict") and hasattr(getattr(config, "config", None), "to_dict"):
        raise MappingError(f"config: expected a config, found a {type(config).__name__}: pass model.config")
    content = config.to_dict() if hasattr(config, "to_dict") else config
    try:
        config = json.loads(json.dumps(content, default=_listed))
    except (TypeError, ValueError, RecursionError) as error:
        raise MappingError(f"config: cannot be stored as JSON: {error}") from error
    if not isinstance(config, dict):
        raise MappingError(f"config: expected the content of a config.json, found {shown(content)}")
    return config


def _listed(value: Any) -> list[Any]:
    """Return a set as a list, as PEFT stores those of its configs."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{value!r:.80} is not a value of JSON")


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of the `config.json` beside a checkpoint's files, or of an adapter's; {} if there is none.

    Raises `MappingError` if it is not a JSON object, and `StorageError` if it cannot be read or is too long.
    """
    return _read_beside(checkpoint, ADAPTER_CONFIG_NAME if checkpoint.is_adapter else CONFIG_NAME)


def _read_beside(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    directory = posixpath.dirname(checkpoint.files[0].path) or "."
    file = checkpoint.store.find(posixpath.join(directory, name))
    return {} if file is None else parse_config(file)


def parse_config(file: File) -> dict[str, Any]:
    """Read and close a `config.json`, and return its content; raises as `read_config`."""
    text = read_small(file, _MAX_CONFIG_BYTES)
    try:
        config = strict_json.loads(text)
    except ValueError as error:
        raise MappingError(f"{file.path}: is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise MappingError(f"{file.path}: expected a JSON object, found {shown(config)}")
    return config


def quantization_config(config: Mapping[str, Any]) -> Any:
    """Return how tensors are quantised: by the whole model's config, or by that of its text model.

    MLX's own key comes first: what other keys say is a copy of it, or is of the tensors that MLX has quantised. MLX
    names no method.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        if isinstance(mlx := part.get(_MLX_KEY), Mapping):
            return {"quant_method": "mlx", **mlx}
        for key in QUANTIZATION_KEYS:
            if (stated := part.get(key)) is not None:
                return stated
    return None


def quantization_beside(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return what a file of its own says of how tensors are quantised, as `config.json` of newer checkpoints has it.

    Returns None if there is no such file; raises as `read_config`.
    """
    if config := _read_beside(checkpoint, _MODELOPT_NAME):
        stated = config.get("quantization")
        return {"quant_method": "modelopt", **(stated if isinstance(stated, Mapping) else {})}
    if config := _read_beside(checkpoint, _GPTQ_NAME):
        return {"quant_method": "gptq", **config}
    return _read_beside(checkpoint, _AUTOROUND_NAME) or None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that does not say how tensors are quantised."""
    plain = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in text.items() if key not in QUANTIZATION_KEYS}
    return plain


def stored_dtype(config: Mapping[str, Any], otherwise: np.dtype) -> np.dtype:
    """Return the dtype in which the model's tensors are stored, by its config, or `otherwise`; see `config_dtype`."""
    return otherwise if (dtype := config_dtype(config)) is None else dtype


def config_dtype(config: Mapping[str, Any]) -> np.dtype | None:
    """Return the dtype that a config names, or that of its text model; None if it names none.

    A dict has a dtype for each part of the model, and that of all others under "". Raises `MappingError` if it is not a
    floating type of 16 bits or more.
    """
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    name = next((part[key] for part in parts for key in DTYPE_KEYS if part.get(key)), None)
    if isinstance(name, Mapping):
        name = name.get("text_config", name.get(""))
    if name is None:
        return None
    try:
        found = np.dtype(name).name if isinstance(name, str) else None
    except (TypeError, ValueError):
        found = None
    if found not in _FLOATS:
        raise MappingError(f"config.json: expected dtype {', '.join(_FLOATS)}, found {shown(name)}")
    return np.dtype(found)
