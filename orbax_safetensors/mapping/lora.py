"""LoRA adapters: arrays as `flax.nnx.LoRA` has them, stored under the names of PEFT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.family import Family, tensor

# PEFT names a module of the model by its path in the wrapped model.
_PREFIX = "base_model.model."


def lora(modules: Mapping[str, str], base: Mapping[str, tuple[int, ...]]) -> Family:
    """Return the family of the LoRA adapters of a model's linear modules.

    The leaf `PATH.lora_a` of shape `[inputs, rank]` is the transpose of PEFT's `lora_A`, and `PATH.lora_b` of shape
    `[rank, outputs]` that of `lora_B`. Ranks are those of the adapter's config.

    Args:
      modules: the Hugging Face module of each path, as `{"layers.{}.q": "model.layers.{}.self_attn.q_proj"}`, where
        `{}` is the number of a layer. If the path has no `{}`, all layers are stacked in front.
      base: the shapes of the base model's tensors by name, as `open_checkpoint(...).shapes` has them.

    Raises:
      MappingError: the base model does not have a module.
    """
    layers = {path: _layers(module, base) for path, module in modules.items()}

    def tree(config: Mapping[str, Any]) -> dict[str, View]:
        leaves: dict[str, View] = {}
        for path, module in modules.items():
            pairs = [_pair(config, module.replace("{}", layer), base) for layer in layers[path]]
            if "{}" in module and "{}" not in path:
                leaves |= _named(path, View.stack([a for a, _ in pairs]), View.stack([b for _, b in pairs]))
                continue
            for layer, (a, b) in zip(layers[path], pairs, strict=True):
                leaves |= _named(path.replace("{}", layer), a, b)
        return leaves

    return Family("peft.lora", (), tree)


def _named(path: str, a: View, b: View) -> dict[str, View]:
    return {f"{path}.lora_a": a, f"{path}.lora_b": b}


def _layers(module: str, base: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return what stands for `{}` in the modules of the base model, in the order of the numbers."""
    before, _, after = f"{module}.weight".partition("{}")
    pattern = re.compile(re.escape(before) + (r"(\d+)" + re.escape(after) if "{}" in module else "()"))
    found = {match[1] for name in base if (match := pattern.fullmatch(name)) and len(base[name]) == 2}
    if not found:
        raise MappingError(f"the base model has no matrix {module + '.weight'!r}")
    return sorted(found, key=lambda number: int(number or 0))


def _pair(config: Mapping[str, Any], module: str, base: Mapping[str, tuple[int, ...]]) -> tuple[View, View]:
    """Return both adapters of a module."""
    if "r" not in config:
        raise MappingError(
            "the config has no 'r', the rank of an adapter; a restore reads it from adapter_config.json, and a save "
            "takes it from config= or like="
        )
    if not _is_target(config.get("target_modules"), module):
        raise MappingError(f"{module!r} is not one of the config's target_modules, {config.get('target_modules')!r}")
    outputs, inputs = base[f"{module}.weight"]
    ranks = (config.get("rank_pattern") or {}).items()  # by pattern; the first that matches counts
    rank = next((rank for pattern, rank in ranks if re.fullmatch(rf"(.*\.)?({pattern})", module)), config["r"])
    a = tensor(f"{_PREFIX}{module}.lora_A.weight", (rank, inputs))
    return a.T, tensor(f"{_PREFIX}{module}.lora_B.weight", (outputs, rank)).T


def _is_target(targets: Any, module: str) -> bool:
    """Return whether PEFT gives a module an adapter: by a pattern, or by the ends of names."""
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)
