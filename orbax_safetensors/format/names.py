"""Names of tensors: a few of many, in messages, and the one that was meant."""

import bisect
import difflib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

_T = TypeVar("_T")

_VALUE = ".value"

# What an error lists before it says how much more there is.
_LISTED = 8
# How far from where a name would stand in the order of all names those are that may be meant.
_NEAR = 20


def some(found: Sequence[_T], text: Callable[[_T], str] = str, separator: str = ", ") -> str:
    """The first of `found`, each as its `text`, and how many more there are."""
    more = len(found) - _LISTED
    return separator.join(text(one) for one in found[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def same(name: str, names: Container[str]) -> str:
    """The one of `names` that means `name`, or `name` itself if none does.

    Paths in an `nnx.State` end in `.value`, those of the same leaves in other trees do not.
    """
    if name in names:
        return name
    other = without_value(name) if name.endswith(_VALUE) else name + _VALUE
    return other if other in names else name


def by_same(leaves: Mapping[str, _T], names: Container[str]) -> dict[str, _T]:
    """Leaves under those of `names` that mean theirs; under their own names if two of them would have one."""
    renamed = {same(name, names): leaf for name, leaf in leaves.items()}
    return renamed if len(renamed) == len(leaves) else dict(leaves)


def without_value(name: str) -> str:
    """A path without the `.value` at the end of those in an `nnx.State`."""
    return name.removesuffix(_VALUE)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is most like `name`, if any is.

    Names that are alike begin alike, and so stand close to one another in order, or lack a prefix. To look at all of
    45,000 would take seconds.
    """
    ordered = sorted(names)
    at = bisect.bisect(ordered, name)
    close = ordered[max(at - _NEAR, 0) : at + _NEAR]
    close += [other for other in ordered if other.endswith(f".{name}")][:_NEAR]
    found = difflib.get_close_matches(name, close, n=1) if len(name) < 1000 else []
    return found[0] if found else None
