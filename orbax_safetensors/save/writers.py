"""Assign the boxes of a tree's leaves to the processes that write them, and order them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax

from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.sharding import holders, local_holders
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.names import some
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.groups import by_tensors
from orbax_safetensors.save.pieces import Views
from orbax_safetensors.transfer.plan import Location

Owned = tuple[Leaf, tuple[Box, ...]]  # a leaf, and its boxes that this process writes


def grouped(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """Return groups of leaves of the same tensors, whose runs in the files are longer if written together."""
    return [[leaves[at] for at in group] for group in by_tensors([leaf.view for leaf in leaves])]


def written_here(groups: Iterable[Sequence[Leaf]], active: ActiveProcesses) -> Iterator[tuple[Owned, ...]]:
    """Yield each group of leaves with the boxes that this process writes.

    Raises `TensorMismatchError` if no active process holds a part of a leaf.
    """
    process = jax.process_index()

    def held(leaf: Leaf) -> Mapping[Box, tuple[int, ...]]:
        if not isinstance(leaf.value, jax.Array):
            return {Box.whole(leaf.shape): active.indices}
        local = local_holders(leaf.value.sharding, leaf.shape)
        if active.count == jax.process_count():
            return local
        by_box = {
            box: tuple(holder for holder in of_box if holder in active.indices)
            for box, of_box in holders(leaf.value.sharding, leaf.shape, None).items()
        }
        if not all(by_box.values()):
            raise TensorMismatchError(
                f"{leaf.name!r}: parts of it are only on devices of processes that do not save; those that do are "
                f"{some(active.indices)}, by primary_host and active_processes of MultiprocessingOptions"
            )
        return {box: by_box[box] for box in local}

    for group in assign_writers(groups, held):
        yield tuple(
            (leaf, tuple(box for box, writer in writers.items() if writer == process)) for leaf, writers in group
        )


def assign_writers(
    groups: Iterable[Sequence[Leaf]], holders: Callable[[Leaf], Mapping[Box, tuple[int, ...]]]
) -> Iterator[list[tuple[Leaf, dict[Box, int]]]]:
    """Yield each group of leaves with the process that writes each box, given the processes that hold it.

    Of the processes that hold a box, the writer is the one with the fewest bytes so far, counting only boxes that
    exactly these processes hold. In a group, the same box of all leaves has the same writer. Processes see the boxes
    that they hold in the same order, so they agree without communication.
    """
    loads_of: dict[tuple[int, ...], list[int]] = {}  # bytes to write, by the processes that hold a box
    for group in groups:
        writers: dict[tuple[Box, tuple[int, ...]], int] = {}
        out = []
        for leaf in group:
            writer_of = {}
            for box, held_by in holders(leaf).items():
                loads = loads_of.setdefault(held_by, [0] * len(held_by))
                at = writers.setdefault((box, held_by), loads.index(min(loads)))
                loads[at] += box.volume * leaf.dtype.itemsize
                writer_of[box] = held_by[at]
            out.append((leaf, writer_of))
        yield out


def in_file_order(
    groups: Iterable[tuple[Owned, ...]], views: Views | None, places: Mapping[str, Location]
) -> list[tuple[Owned, ...]]:
    """Return groups in the order of their bytes in the files.

    Groups whose bytes interleave become one group, so that each group is one stretch of the files.
    """
    spans = []
    for group in groups:
        stored_views = [leaf.view if views is None else views[leaf.name, box] for leaf, boxes in group for box in boxes]
        at = [(places[name].file, places[name].begin) for view in stored_views for name in view.tensors]
        spans.append((min(at, default=(0, 0)), max(at, default=(0, 0)), group))
    spans.sort(key=lambda span: span[:2])
    out: list[tuple[Owned, ...]] = []
    last = (-1, 0)
    for low, high, group in spans:
        if low < last:
            out[-1] += group
        else:
            out.append(group)
        last = max(last, high)
    return out
