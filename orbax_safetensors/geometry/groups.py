"""Groups of views that share stored tensors: if a group moves together, each tensor is read once."""

from __future__ import annotations

from collections.abc import Sequence

from orbax_safetensors.geometry.view import View


def by_tensors(views: Sequence[View]) -> list[list[int]]:
    """Return the positions of `views` in groups that share tensors, directly or through other views."""
    names = [name for view in views for name in view.tensors]
    if len(set(names)) == len(names):
        return [[number] for number in range(len(views))]
    group_of: dict[str, int] = {}
    groups: dict[int, list[int]] = {}
    for number, view in enumerate(views):
        groups[number] = [number]
        tensors = view.tensors
        if not group_of.keys().isdisjoint(tensors):
            for other in sorted({group_of[name] for name in tensors if name in group_of}):
                groups[number] = groups.pop(other) + groups[number]
                group_of |= {name: number for member in groups[number] for name in views[member].tensors}
        for name in tensors:
            group_of[name] = number
    return [sorted(group) for group in groups.values()]
