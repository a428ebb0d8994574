"""Rows of sglang-jax's tables: objects with the fields of its `WeightMapping`, by the whole names of stored tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.names import some
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.family import Shapes, tensor

# The beginning of the keys whose `target_path` is a path and the names of tensors, which the leaf stacks in this order.
_EXPERTS = "__MOE_EXPERTS__"


def is_weight_mapping(value: Any) -> bool:
    """Return whether a row of a table has the form of a `WeightMapping`."""
    return hasattr(value, "target_path")


def mapped(mappings: Mapping[str, Any], stored: Shapes) -> Iterator[tuple[str, View, str]]:
    """Yield the path, the view and the first tensor of every leaf that rows make of the `stored` tensors.

    Raises `MappingError` for a row whose leaf needs more than the row says, and for one some of whose tensors are not
    stored. A row that is for no stored tensor makes no leaf.
    """
    for key, row in mappings.items():
        for path, names in _leaves(key, row.target_path, stored):
            missing = [name for name in names if name not in stored]
            if len(missing) == len(names):
                continue
            if missing:
                raise MappingError(f"{key!r}: {len(missing)} of {len(names)} are not stored: {some(missing, repr)}")
            yield _checked_path(key, path, row), _view(key, row, names, stored), names[0]


def _leaves(key: str, target: Any, stored: Shapes) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield the paths of a row with the names of their tensors; each `*` stands for a part of the name."""
    if key.startswith(_EXPERTS):
        path, *names = target
        yield path, names
    elif "*" in key and isinstance(target, str):
        pattern = re.compile(re.escape(key).replace(r"\*", "(.*?)"))
        for name in stored:
            if match := pattern.fullmatch(name):
                if target.count("*") > key.count("*"):
                    raise MappingError(f"{key!r}: {target!r} has more `*` than the name")
                yield target.replace("*", "{}").format(*match.groups()), [name]
    else:
        yield target, [key]


def _checked_path(key: str, path: Any, row: Any) -> str:
    """Return the path of a leaf; `MappingError` if sglang-jax does more than the row says."""
    if not isinstance(path, str):
        raise MappingError(
            f"{key!r}: {path!r:.200} are parts of one tensor, and their sizes are not in the table; give the tensor a "
            "row of your own, a list of (path, function)"
        )
    if path.startswith("__") or key == "d2t":
        raise MappingError(f"{key!r}: {path!r} is not a leaf of the tree; sglang-jax computes with this tensor")
    if getattr(row, "repeat", None) is not None:
        raise MappingError(f"{key!r}: a leaf that repeats its tensor, {row.repeat}, is not supported")
    return path


def _view(key: str, row: Any, names: Sequence[str], stored: Shapes) -> View:
    """Return the leaf of a row: transposed, stacked, then reshaped."""
    views = [_transposed(row, tensor(name, stored[name])) for name in names]
    view = views[0]
    if key.startswith(_EXPERTS):
        order = getattr(row, "physical_to_logical_map", None)
        view = View.stack(views if order is None else [views[number] for number in order])
    return view if row.reshape is None else view.reshape(row.reshape)


def _transposed(row: Any, view: View) -> View:
    """Return a tensor with its dimensions in the order of a row; `transpose` swaps the last two, if there are two."""
    if row.transpose_axes is not None:
        return view.transpose(row.transpose_axes)
    if row.transpose and len(view.shape) > 1:
        *others, rows, columns = range(len(view.shape))
        return view.transpose((*others, columns, rows))
    return view
