"""Families at work: a checkpoint seen as the model's own tree, and a tree taken apart into stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import quantization_config, read_config, stored_dtype
from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.checkpoint.quantized import codes_and_scales, quantized_tensors, scales_beside, split
from orbax_safetensors.checkpoint.record import recalled
from orbax_safetensors.errors import MappingError, SafetensorsError, TensorMismatchError
from orbax_safetensors.format.names import by_path, by_same
from orbax_safetensors.geometry.elementwise import Cast
from orbax_safetensors.geometry.view import UNKNOWN, View
from orbax_safetensors.mapping import inference, registry
from orbax_safetensors.mapping.coverage import check_leaves, check_shapes, check_use, doubles, present
from orbax_safetensors.mapping.family import Family, LeafShapes, Shapes, Tree, Variant, switches_of, wrapper_of
from orbax_safetensors.mapping.quantization import Quantization
from orbax_safetensors.options import Dequantize

FamilyLike = Family | str | None

_Result = TypeVar("_Result")


def mapped(
    checkpoint: Checkpoint,
    requested_family: FamilyLike,
    variant: Mapping[str, Any] | None,
    *,
    complete: bool,
    dequantize: Dequantize,
) -> Checkpoint:
    """Return `checkpoint` as a family sees it: the caller's, a registered one, or none.

    See `SafetensorsOptions` for `dequantize`. With `complete`, each stored tensor has to be used once; without it,
    leaves whose tensors are not all stored are left out, and there may be other tensors. Raises `MappingError` if there
    is no such family, or if config, variant and tensors disagree.
    """
    variant = switches_of(variant)
    if requested_family is None and not registry.any_registered():
        without_family(variant)
        return checkpoint
    config = read_config(checkpoint)
    try:
        family = registry.find(requested_family, config)
        if family is None:
            without_family(variant)
            return checkpoint
        (family,) = recalled([family], checkpoint)
        return decoded(checkpoint, config, dequantize).mapped_by(family, config, variant, complete=complete)
    except MappingError as error:
        raise MappingError(f"{checkpoint.path}: {error}") from error


def with_variant(
    attempt: Callable[[Variant], _Result],
    variant: Variant | None,
    nearest: Callable[[Variant], Variant | None],
    other_family: Callable[[], str | None] = lambda: None,
) -> _Result:
    """Return what `attempt` makes of a family's switches: those that are passed, and for others what fits.

    Others have the family's defaults, or if these do not fit, the values that are `nearest` to the passed ones. Raises
    what `attempt` raises. If a passed switch is wrong, the error names the variant that would fit; otherwise it names
    the `other_family` that would.
    """
    passed = switches_of(variant)
    try:
        return attempt(passed)
    except (MappingError, TensorMismatchError) as error:
        refusal = error
    switches = nearest(passed)
    if switches not in (None, passed):
        try:
            return attempt(switches)
        except (MappingError, TensorMismatchError) as error:
            refusal = error
    if passed:
        fitting = {**passed, **(nearest({}) or {})}
        with suppress(SafetensorsError):
            attempt(fitting)
            refusal = type(refusal)(f"{refusal}; this tree is that of variant={fitting}")
            raise refusal
    if name := other_family():
        refusal = type(refusal)(f"{refusal}; its leaves are those of family={name!r}")
    raise refusal


def other_family_of(leaves: LeafShapes, config: Mapping[str, Any], requested_family: FamilyLike) -> str | None:
    """Return the name of another family than the caller's whose tree has exactly these leaves; None if none has."""
    with suppress(MappingError):
        if (family := registry.find(requested_family, config)) is None:
            return None
        others = [other for other in registry.known_for(config) if other.name != family.name]
        return inference.fit(others, config, leaves, {}).family.name
    return None


def nearest_variant(
    checkpoint: Checkpoint, requested_family: FamilyLike, leaves: LeafShapes, passed: Variant
) -> Variant | None:
    """Return the variant of the checkpoint's family with the `passed` switches whose tree is nearest to these leaves.

    Returns None without a family, and if none of its variants has a tree.
    """
    if requested_family is None and not registry.any_registered():
        return None
    config = read_config(checkpoint)
    try:
        family = registry.find(requested_family, config)
        if family is None:
            return None
        return inference.nearest_variant(family, config, leaves, passed, checkpoint.shapes)
    except MappingError:
        return None


def nearest_to(
    leaves: Sequence[Leaf], family: Family | None, config: Mapping[str, Any], stored: Shapes | None = None
) -> Callable[[Variant], Variant | None]:
    """Return what `with_variant` takes for leaves to store; `stored` are the shapes of the checkpoint to be like."""
    shapes = {leaf.name: leaf.shape for leaf in leaves}

    def nearest(passed: Variant) -> Variant | None:
        return None if family is None else inference.nearest_variant(family, config, shapes, passed, stored)

    return nearest


def fitted(checkpoint: Checkpoint, leaves: LeafShapes, *, dequantize: Dequantize) -> tuple[Checkpoint, dict[str, str]]:
    """Return `checkpoint` as the registered family sees it whose tree has exactly these leaves, and their paths in it.

    If all leaves are stored tensors, or no family is registered, the checkpoint stays as it is. Raises `MappingError`
    if no registered family is for its architecture or has such a tree, and if several have.
    """
    as_stored = {name: path for path, name in by_same({name: name for name in leaves}, checkpoint.tensors).items()}
    if checkpoint.tensors.keys() >= set(as_stored.values()) or not registry.any_registered():
        return checkpoint, as_stored
    try:
        config = read_config(checkpoint)
        plain = decoded(checkpoint, config, dequantize)
        families = recalled(registry.registered_for(config), checkpoint)
        choice = inference.fit(families, config, leaves, plain.checkpoint.shapes)
        fitting = plain.mapped_by(choice.family, config, choice.variant, complete=True)
    except MappingError as error:
        if not checkpoint.tensors.keys().isdisjoint(as_stored.values()):
            return checkpoint, as_stored  # the caller wants stored tensors, and one that is missing
        raise MappingError(f"{checkpoint.path}: {error}") from error
    return fitting, dict(choice.paths)


def without_family(variant: Mapping[str, Any]) -> None:
    """Raise `MappingError` if a caller passes switches without a family."""
    if variant:
        raise MappingError(f"variant {dict(variant)} is for a family, and there is none; also pass family=")


# Why a family does not fit the tensors of a quantised checkpoint.
_AS_STORED = (
    "; the checkpoint is quantised, and dequantize=False keeps codes and scales as they are stored: for a family that "
    "does not use both, pass dequantize=True or 'split'"
)


@contextmanager
def _explained(why: str) -> Iterator[None]:
    """Add `why` to a `MappingError`."""
    try:
        yield
    except MappingError as error:
        if not why:
            raise
        raise MappingError(f"{error}{why}") from error


class Decoded(NamedTuple):
    """A checkpoint with the tensors that a family sees.

    Attributes:
      encoded: what is quantised of it.
      spared: the tensors that only quantised computation needs.
    """

    checkpoint: Checkpoint
    encoded: Quantization
    spared: Set[str]
    dequantize: Dequantize

    def mapped_by(
        self, family: Family, config: Mapping[str, Any], variant: Mapping[str, Any], *, complete: bool
    ) -> Checkpoint:
        """Return the checkpoint as a family sees it; see `mapped`."""
        checkpoint, encoded, spared, dequantize = self
        described_as = family.renamed(checkpoint.shapes, config)
        stored = {name: tensor for tensor, name in described_as.items()}
        if len(stored) < len(described_as):
            twice = next(name for tensor, name in described_as.items() if stored[name] != tensor)
            raise MappingError(f"{family.name}: its `renames` give several stored tensors the name {twice!r}")
        shapes = {name: checkpoint.shapes[tensor] for name, tensor in stored.items()}
        bound: set[str] = set()
        unbound: dict[str, tuple[int, ...]] = {}

        def bind(name: str, shape: tuple[int, ...]) -> View:
            if shapes.get(name) != shape:
                unbound[name] = shape
                return View.tensor(name, shape, UNKNOWN)
            if (
                dequantize
                and stored[name] not in encoded.tensors
                and (scales := scales_beside(checkpoint, stored[name]))
            ):
                raise MappingError(
                    f"{name!r} has scales, {scales!r}, and quantization_config of config.json does not say how it is "
                    "quantised; a family that knows needs SafetensorsOptions(dequantize=False)"
                )
            bound.add(name)
            return checkpoint.view(stored[name])

        values = {name: shape for name, shape in shapes.items() if stored[name] not in spared}
        tree = family.describe(config, family.variant_of(shapes, variant), bind, values)
        use = family.use(config, shapes, variant)
        tree = present(tree, unbound.keys() - shapes.keys(), complete=complete)
        made_of = {name for view in tree.values() for name in view.tensors}
        if unbound and (paths := (by_path(shapes, tree).keys() & tree.keys()) - made_of):
            raise MappingError(
                f"{family.name}: the checkpoint has leaves of the family's tree, such as {min(paths)!r}, as tensors: "
                "it was saved without family=; load it without, or save it with family="
            )
        is_plain = bool(dequantize) or quantization_config(config) is None
        misfit = ": config.json does not fit the files (it may be of another model)" if is_plain else ""
        with _explained("" if is_plain else _AS_STORED):
            where = family.name if unbound.keys().isdisjoint(shapes) else f"{family.name}{misfit}"
            check_shapes(where, tree, unbound, shapes)
        if constant := [path for path, view in tree.items() if view.dtype == UNKNOWN]:
            raise MappingError(f"{family.name}: {constant[0]!r} is a constant without a dtype; `full` takes one")
        if complete:
            needed = {name: shape for name, shape in shapes.items() if name in bound or stored[name] not in spared}
            with _explained("" if is_plain else _AS_STORED):
                check_use(
                    family.name,
                    tree,
                    needed,
                    lambda name: described_as[checkpoint.whole(name)],
                    misfit="" if not config or checkpoint.is_adapter else misfit,
                )
        shared = {stored[name] for name in tree.shared & stored.keys()}
        seen = split(checkpoint, tree, encoded) if dequantize == "split" else Tree(tree, shared=shared)
        return replace(checkpoint, mapped=seen, use=use, wrapper=wrapper_of(family, use.variant))


def decoded(checkpoint: Checkpoint, config: Mapping[str, Any], dequantize: Dequantize) -> Decoded:
    """Return `checkpoint` with its quantised tensors as `dequantize` says, according to its `config.json`."""
    encoded = quantized_tensors(checkpoint, config) if dequantize else Quantization({})
    spared: Set[str] = encoded.unused
    if dequantize == "split":
        spared |= {name for quantized in encoded.tensors.values() for name in quantized.parameters}
        checkpoint = codes_and_scales(checkpoint, encoded)
    elif encoded.tensors:
        dtype = stored_dtype(config, checkpoint.decoded_dtype)
        checkpoint = replace(checkpoint, quantized=encoded.tensors, decoded_dtype=dtype)
    return Decoded(checkpoint, encoded, spared, dequantize)


TensorTypes = dict[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape, by name


def stored_leaves(
    leaves: Sequence[Leaf], family: Family | None, variant: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[list[Leaf], TensorTypes]:
    """Return `leaves` with the views that a family has for them, and dtype and shape of the tensors to store, by name.

    Without a family, each leaf is a tensor. A tensor has the dtype of its leaf, or the config's if the family casts and
    the caller names no dtype. Raises `MappingError` if config, variant and leaves disagree.
    """
    if family is None:
        without_family(variant)
        return list(leaves), {leaf.name: (leaf.dtype, leaf.shape) for leaf in leaves}
    shapes: dict[str, tuple[int, ...]] = {}

    def bind(name: str, shape: tuple[int, ...]) -> View:
        if shapes.setdefault(name, shape) != shape:
            raise MappingError(f"{family.name}: expected one shape of {name!r}, found {shapes[name]} and {shape}")
        return View.tensor(name, shape, UNKNOWN)

    tree = family.describe(config, variant, bind, leaves=len(leaves))
    paths = by_path({leaf.name: leaf for leaf in leaves}, tree)
    tree = check_leaves(family.name, tree, {path: leaf.shape for path, leaf in paths.items()})
    left_out = doubles(tree, shapes)
    viewed, tensors = [], TensorTypes()
    for path, leaf in paths.items():
        view = replace(tree[path], dtype=leaf.value.dtype)
        for piece in view.pieces:
            if piece.tensor is None:
                continue
            casts = any(isinstance(op, Cast) for op in piece.ops)
            dtype = stored_dtype(config, leaf.dtype) if casts and not leaf.dtype_is_chosen else leaf.dtype
            add_tensor(tensors, family.name, leaf.name, piece.tensor, dtype, shapes[piece.tensor])
        viewed.append(replace(leaf, view=view, is_double=path in left_out))
    # A save has to fill every tensor.
    check_use(family.name, Tree(tree, shared=tree.shared), {name: shape for name, (_, shape) in tensors.items()})
    return viewed, dict(sorted(tensors.items(), key=lambda item: by_number(item[0])))


def add_tensor(tensors: TensorTypes, where: str, leaf: str, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Add a tensor that `leaf` is stored in; raise `MappingError` if another leaf has it in another dtype."""
    if (other := tensors.setdefault(name, (dtype, shape))[0]) != dtype:
        raise MappingError(f"{where}: {leaf} of {dtype} and another leaf of {other} are parts of one tensor, {name!r}")


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `layers.2` before `layers.10`, so that a layer's tensors are neighbours."""
    # Not as integers: Python refuses to read those of some thousand digits.
    numbers = [(part, part.lstrip("0")) for part in name.split(".")]
    return [(len(number), number) if part.isdecimal() else (-1, part) for part, number in numbers]
