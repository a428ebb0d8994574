"""LoRA adapters: arrays as `flax.nnx.LoRA` has them, stored under the names of PEFT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.names import hint
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.family import Family, tensor

# PEFT names a module of the model by its path in the wrapped model.
_PREFIX = "base_model.model."
# Which modules have adapters.
_CHOOSING = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
# Adapters with these have other tensors besides, without which PEFT computes something else or does not load them.
_WITH_OTHER_TENSORS = ("use_dora", "modules_to_save")
# Where the config comes from.
_CONFIG = "a restore reads it from adapter_config.json, and a save takes it from config= or like="


def lora(modules: Mapping[str, str], base: Mapping[str, tuple[int, ...]]) -> Family:
    """Return the family of the LoRA adapters of a model's linear modules.

    ```python
    shapes = ost.open_checkpoint("/models/llama").shapes
    family = ost.mapping.lora({"layers.{}.q": "model.layers.{}.self_attn.q_proj"}, shapes)
    ```

    The leaf `PATH.lora_a` of shape `[inputs, rank]` is the transpose of PEFT's `lora_A`, and `PATH.lora_b` of shape
    `[rank, outputs]` that of `lora_B`. Ranks are `r` of the adapter's config, or those of its `rank_pattern`. A restore
    or save raises `MappingError` if the config gives a module no adapter, if it is of another kind than LoRA, and if it
    has `use_dora` or `modules_to_save`.

    Args:
      modules: the Hugging Face module of each path, as `{"layers.{}.q": "model.layers.{}.self_attn.q_proj"}`, where
        `{}` is the number of a layer. If the path has no `{}`, all layers are stacked in front.
      base: the shapes of the base model's tensors by name, as `open_checkpoint(...).shapes` has them.

    Raises:
      MappingError: the base model does not have a module, or a path has `{}` and its module does not.
    """
    for path, module in modules.items():
        if "{}" in path and "{}" not in module:
            raise MappingError(f"path {path!r} has {{}} for the number of a layer, and its module {module!r} does not")
    layers = {path: _layers(module, base) for path, module in modules.items()}

    def tree(config: Mapping[str, Any]) -> dict[str, View]:
        check_kind(config)
        leaves: dict[str, View] = {}
        for path, module in modules.items():
            pairs = [pair(config, module.replace("{}", layer), base) for layer in layers[path]]
            if "{}" in module and "{}" not in path:
                leaves |= _named(path, View.stack([a for a, _ in pairs]), View.stack([b for _, b in pairs]))
                continue
            for layer, (a, b) in zip(layers[path], pairs, strict=True):
                leaves |= _named(path.replace("{}", layer), a, b)
        return leaves

    return Family("peft.lora", (), tree)


def check_kind(config: Mapping[str, Any]) -> None:
    """Raise `MappingError` if an adapter is more than pairs of matrices, or something else."""
    if "peft_type" not in config:
        raise MappingError(f"the config has no 'peft_type', which is 'LORA' for these adapters; {_CONFIG}")
    if (kind := config["peft_type"]) != "LORA":
        raise MappingError(f"adapter_config.json: expected peft_type 'LORA', found {kind!r}")
    for key in _WITH_OTHER_TENSORS:
        if config.get(key):
            raise MappingError(
                f"adapter_config.json: {key} is {config[key]!r}: such adapters have tensors that `lora` has no leaf for"
            )


def _named(path: str, a: View, b: View) -> dict[str, View]:
    return {f"{path}.lora_a": a, f"{path}.lora_b": b}


def _layers(module: str, base: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return what stands for `{}` in the modules of the base model, in the order of the numbers."""
    before, _, after = f"{module}.weight".partition("{}")
    pattern = re.compile(re.escape(before) + (r"(\d+)" + re.escape(after) if "{}" in module else "()"))
    found = {match[1] for name in base if (match := pattern.fullmatch(name)) and len(base[name]) == 2}
    if not found:
        if module.endswith(".weight"):
            raise MappingError(f"{module!r}: name the module, without .weight")
        modules = {name.removesuffix(".weight") for name, shape in base.items() if len(shape) == 2}
        similar = hint(module.replace("{}", "0"), modules)
        raise MappingError(f"the base model has no matrix {module + '.weight'!r}{similar}")
    return sorted(found, key=lambda number: (len(number.lstrip("0")), number.lstrip("0")))


def pair(config: Mapping[str, Any], module: str, base: Mapping[str, tuple[int, ...]]) -> tuple[View, View]:
    """Return both adapters of a module: `[inputs, rank]` and `[rank, outputs]`, by the shapes of the base model."""
    if "r" not in config:
        raise MappingError(f"the config has no 'r', the rank of an adapter; {_CONFIG}")
    if not is_target(config, module):
        chosen = {key: config[key] for key in _CHOOSING if config.get(key) is not None}
        raise MappingError(f"{module!r} is not one of the modules to which the config gives adapters: {chosen}")
    outputs, inputs = base[f"{module}.weight"]
    ranks = (config.get("rank_pattern") or {}).items()  # by pattern; the first that matches counts
    rank = next((rank for pattern, rank in ranks if re.fullmatch(rf"(.*\.)?({pattern})", module)), config["r"])
    a, b = tensor(part_name(module, "A"), (rank, inputs)), tensor(part_name(module, "B"), (outputs, rank))
    return a.T, b.T


def part_name(module: str, part: str) -> str:
    """Return the stored name of a module's adapter, `part` "A" or "B"."""
    return f"{_PREFIX}{module}.lora_{part}.weight"


def is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether PEFT gives a module an adapter."""
    if (excluded := config.get("exclude_modules")) and _is_named(excluded, module):
        return False
    targets = config.get("target_modules")
    if targets not in (None, "all-linear"):
        if not _is_named(targets, module):
            return False
        if isinstance(targets, str) or module in targets:
            return True
    return _is_in_layers(config, module)


def _is_named(names: Any, module: str) -> bool:
    """Return whether `names` have a module: a pattern, or a list of ends of names."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_in_layers(config: Mapping[str, Any], module: str) -> bool:
    """Return whether a module is in one of the layers to transform, by the first number in its name."""
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    names = config.get("layers_pattern") or []
    above = [rf"(?:.*?\.)?{name}" for name in ([names] if isinstance(names, str) else names)] or [r".*?\.[^.]*"]
    matches = (re.match(rf"{pattern}\.(\d+)\.", module) for pattern in above)
    number = next((int(match[1]) for match in matches if match), None)
    return number in (layers if isinstance(layers, list) else [layers])
