"""MaxText's LoRA adapters, stored under the names of PEFT.

They follow from the kernels of the base model: `kernel_lora_a` has a kernel's inputs as one dimension, `kernel_lora_b`
its outputs, in the order in which the kernel has them. Factors of a kernel are those of `kernel_lora_b`. Layers are
stacked as those of the base model, with zeros for layers without an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.geometry.elementwise import Scale
from orbax_safetensors.geometry.strided import row_major
from orbax_safetensors.mapping import Family, View, full, stack
from orbax_safetensors.mapping.architectures import architecture_text, is_for
from orbax_safetensors.mapping.config_tree import tree_of_config
from orbax_safetensors.mapping.families.maxtext.common import TRAINING_STATE, variants
from orbax_safetensors.mapping.families.stored import LANGUAGE_MODEL, Config, Leaves
from orbax_safetensors.mapping.family import is_stored
from orbax_safetensors.mapping.lora import check_kind, is_target, pair, part_name

# With these, PEFT has several ranks or factors. MaxText has one rank and the factor `lora_alpha / lora_rank`.
_SEVERAL = ("rank_pattern", "alpha_pattern", "use_rslora")


def lora_of(families: Sequence[Family]) -> Family:
    """Return the family of adapters for models of `families`."""

    def tree(
        config: Config,
        *,
        base: Any = None,
        scan_layers: bool = True,
        param_scan_axis: int = 1,
        rope_type: str | None = None,
    ) -> Leaves:
        _check_factors(config)
        family = _family_of(base, families)
        of_base: dict[str, Any] = {} if rope_type is None else {"rope_type": rope_type}
        if "mtp" in family.switches:
            of_base["mtp"] = False  # PEFT does not see these layers, as `transformers` drops them
        layers, shapes = tree_of_config(family, base, {**of_base, "scan_layers": False})
        kernels = {view.tensors[0]: view for path, view in layers.items() if _is_linear(path, view, shapes)}
        modules = {name: _module(name, family, base) for name in kernels}
        leaves: Leaves = {}
        of_base |= {"scan_layers": scan_layers, "param_scan_axis": param_scan_axis}
        for path, view in tree_of_config(family, base, of_base)[0].items():
            if not kernels.keys() >= set(view.tensors):
                continue
            pairs = [
                _pair(config, modules[name], kernels[name], shapes[name]) if is_target(config, modules[name]) else None
                for name in view.tensors
            ]
            if (like := next(filter(None, pairs), None)) is None:
                continue
            stacked = len(view.shape) - len(kernels[view.tensors[0]].shape)
            if stacked > 1:
                raise MappingError(f"{path} has layers in two dimensions, and its adapters need scan_layers False")
            for which in (0, 1):
                parts = [full(like[which].shape, 0) if of_layer is None else of_layer[which] for of_layer in pairs]
                leaf = f"{path.removeprefix('params.')}_lora_{'ab'[which]}.value"
                leaves[leaf] = stack(parts, param_scan_axis) if stacked else parts[0]
        return leaves

    wrapper = replace(TRAINING_STATE, key="", rest={}, root="")
    return Family("maxtext.lora", (), tree, variants=variants, wrapper=wrapper)


def _check_factors(config: Config) -> None:
    """Raise `MappingError` if an adapter is of another kind than LoRA, or MaxText computes something else with it."""
    check_kind(config)
    for key in _SEVERAL:
        if config.get(key):
            raise MappingError(
                f"adapter_config.json: {key} is {config[key]!r}: MaxText has one rank for all modules, and scales by "
                "lora_alpha / lora_rank"
            )


def _family_of(base: Any, families: Sequence[Family]) -> Family:
    """Return the family of a base model; `MappingError` if its config is missing or of no family."""
    if not isinstance(base, Mapping):
        raise MappingError(
            f"expected the content of the base model's config.json, a dict, as the switch 'base', found {base!r:.80}"
        )
    for family in families:
        if is_for(family, base):
            return family
    raise MappingError(f"no family of MaxText is for the base model, of {architecture_text(base)}")


def _is_linear(path: str, view: View, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a leaf of a model whose layers are not stacked is one linear layer, whole."""
    if not path.endswith(".kernel") or len(view.pieces) != 1:
        return False
    (piece,) = view.pieces
    shape = shapes.get(piece.tensor or "", ())
    return len(shape) == 2 and prod(view.shape) == prod(shape) and all(isinstance(op, Scale) for op in piece.ops)


def _module(name: str, family: Family, base: Mapping[str, Any]) -> str:
    """Return the module that PEFT names for the matrix `name` of the base model.

    Language models inside another model have two spellings; that of `transformers` today is one that the family of the
    base model renames.
    """
    module = name.removesuffix(".weight")
    today = module.replace(LANGUAGE_MODEL, "model.language_model.", 1)
    if is_stored(part_name(module, "A")) or family.renamed([today], base)[today] != module:
        return module
    return today


def _pair(config: Config, module: str, kernel: View, shape: tuple[int, ...]) -> tuple[View, View]:
    """Return both adapters of a module: `[inputs, rank]` and `[rank, outputs]`."""
    outputs, inputs = shape
    a, b = pair(config, module, {f"{module}.weight": shape})
    matrix = kernel.reshape((inputs, outputs))
    a, b = _in_order_of(matrix[:, 0], 1, a), _in_order_of(matrix[0], inputs, b.T).T
    for op in kernel.pieces[0].ops:
        assert isinstance(op, Scale)
        b = b.scale(op.factor)
    return a, b


def _in_order_of(line: View, step: int, factor: View) -> View:
    """Return a `factor` of shape `[features, rank]` with its features in the order of a line of the kernel.

    `step` is how far apart neighbours of the line are stored.
    """
    modes = line.pieces[0].dims[0]
    stored = sorted(modes, key=lambda mode: -mode[1])
    sizes = [size for size, _ in stored]
    if [stride for _, stride in stored] != [stride * step for stride in row_major(sizes)]:
        raise MappingError(f"{line.tensors[0]!r} is not stored as [outputs, inputs], so it has no adapters of MaxText")
    axes = [stored.index(mode) for mode in modes]
    return factor.reshape((*sizes, factor.shape[1])).transpose((*axes, len(axes))).reshape(factor.shape)
