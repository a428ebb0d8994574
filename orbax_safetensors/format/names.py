"""Names of tensors: the first few for a message, the same name with another spelling, and the most similar name."""

import bisect
import difflib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from orbax_safetensors.errors import printable
from orbax_safetensors.format.header import shown

_T = TypeVar("_T")

_VALUE = ".value"

# Flax's collection of parameters: some trees begin below it, and some have it twice.
_COLLECTION = "params."

# Items that an error lists before it counts the rest.
LISTED = 8
# Similar names are searched among this many sorted names before and after a name.
_NEAR = 20


def some(items: Sequence[_T], text: Callable[[_T], str] = str, separator: str = ", ", *, most: int = LISTED) -> str:
    """Return the first few of `items`, each as its `text`, and how many more there are."""
    more = len(items) - most
    return separator.join(printable(text(item)) for item in items[:most]) + (f" and {more} more" if more > 0 else "")


def same(name: str, names: Container[str]) -> str:
    """Return `name` with or without the `.value` of a variable, as it is in `names`; `name` itself if neither is.

    Paths in an `nnx.State` end in `.value`, or have it before the parts of a variable whose value is a tree. Paths of
    the same leaves in other trees do not have it.
    """
    if name in names:
        return name
    variable, _, part = name.rpartition(f"{_VALUE}.")
    for other in (without_value(name), name + _VALUE, f"{variable}.{part}"):
        if other in names:
            return other
    return name


def by_same(leaves: Mapping[str, _T], names: Container[str]) -> dict[str, _T]:
    """Return the leaves under the `same` names in `names`; unchanged if two leaves would have the same name."""
    renamed = {same(name, names): leaf for name, leaf in leaves.items()}
    return renamed if len(renamed) == len(leaves) else dict(leaves)


def by_path(leaves: Mapping[str, _T], paths: Container[str]) -> dict[str, _T]:
    """Return the leaves under the names that they have in `paths`, those of a family's tree.

    A leading `params` level is optional: it is added or left out if that puts more of the names in `paths`.
    """
    above = {_COLLECTION + name: leaf for name, leaf in leaves.items()}
    below = {name.removeprefix(_COLLECTION): leaf for name, leaf in leaves.items()}
    spellings = [by_same(named, paths) for named in (leaves, above, below) if len(named) == len(leaves)]
    return max(spellings, key=lambda named: sum(name in paths for name in named))


def without_value(name: str) -> str:
    """Return a path without the `.value` at the end of paths in an `nnx.State`."""
    return name.removesuffix(_VALUE)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of `names`; None if none is similar.

    Similar names begin alike, and so are close to each other when sorted, or lack a prefix. Comparing all of 45,000
    names would take seconds.
    """
    ordered = sorted(names)
    at = bisect.bisect(ordered, name)
    close = ordered[max(at - _NEAR, 0) : at + _NEAR]
    close += [other for other in ordered if other.endswith(f".{name}")][:_NEAR]
    similar = difflib.get_close_matches(name, close, n=1) if len(name) < 1000 else []
    return similar[0] if similar else None


def hint(name: str, names: Iterable[str]) -> str:
    """Return what a message adds to `name`, which is none of `names`: the most similar of them, if one is similar."""
    similar = nearest(name, names)
    return f" (nearest: {shown(similar)})" if similar else ""
