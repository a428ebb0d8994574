"""Assign what a save writes to processes: the boxes of leaves if processes share files, otherwise whole files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.sharding import all_holders, holders
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.layout import Layout
from orbax_safetensors.format.names import some
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.view import by_tensors
from orbax_safetensors.save.contents import Contents
from orbax_safetensors.save.copied import StoredArray
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.transfer.plan import Location

Owned = tuple[Leaf, tuple[Box, ...]]  # a leaf, and its boxes that this process writes
Holders = Callable[[Leaf], Mapping[Box, tuple[int, ...]]]  # the processes that hold each box of a leaf


def grouped(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """Return groups of leaves of the same tensors, whose runs in the files are longer if written together."""
    return [[leaves[at] for at in group] for group in by_tensors([leaf.view.tensors for leaf in leaves])]


def holders_of(
    leaf: Leaf, everyone: tuple[int, ...], process: int, process_count: int | None
) -> Mapping[Box, tuple[int, ...]]:
    """Return which of the processes `everyone` hold each box of a leaf that `process` holds; see `holders`."""
    value = leaf.value
    if isinstance(value, StoredArray):
        return dict.fromkeys(value.boxes(), everyone)
    if isinstance(value, np.ndarray):
        return {Box.whole(leaf.shape): everyone}
    if value.sharding is None:  # a description, for JAX's default device
        return {Box.whole(leaf.shape): (0,)} if process == 0 else {}
    return holders(value.sharding, leaf.shape, process, process_count)


def written_here(groups: Iterable[Sequence[Leaf]], active: ActiveProcesses) -> Iterator[tuple[Owned, ...]]:
    """Return each group of leaves with the boxes that this process writes.

    Raises `TensorMismatchError` if no active process holds a part of a leaf.
    """
    process = jax.process_index()

    def held(leaf: Leaf) -> Mapping[Box, tuple[int, ...]]:
        local = holders_of(leaf, active.indices, process, None)
        if active.count == jax.process_count() or not isinstance(leaf.value, jax.Array):
            return local
        saving = {
            box: tuple(holder for holder in box_holders if holder in active.indices)
            for box, box_holders in all_holders(leaf.value.sharding, leaf.shape, None).items()
        }
        if not all(saving.values()):
            raise TensorMismatchError(
                f"{leaf.name!r}: parts of it are only on devices of processes that do not save; those that do are "
                f"{some(active.indices)}, by primary_host and active_processes of MultiprocessingOptions"
            )
        return {box: saving[box] for box in local}

    return written_by(process, groups, held)


def written_by(process: int, groups: Iterable[Sequence[Leaf]], holders: Holders) -> Iterator[tuple[Owned, ...]]:
    """Yield each group of leaves with the boxes that `process` writes, given the processes that hold each box.

    Of the processes that hold a box, the writer is the one with the fewest bytes so far, counting only boxes that
    exactly these processes hold. In a group, the same box of all leaves has the same writer. Processes see the boxes
    that they hold in the same order, so they agree without communication.
    """
    loads_of: dict[tuple[int, ...], list[int]] = {}  # bytes to write, by the processes that hold a box
    for group in groups:
        writers: dict[tuple[Box, tuple[int, ...]], int] = {}
        out = []
        for leaf in group:
            written = []
            for box, held_by in holders(leaf).items():
                loads = loads_of.setdefault(held_by, [0] * len(held_by))
                at = writers.setdefault((box, held_by), loads.index(min(loads)))
                loads[at] += box.volume * leaf.dtype.itemsize
                if held_by[at] == process:
                    written.append(box)
            out.append((leaf, tuple(written)))
        yield tuple(out)


def stretches(groups: Iterable[tuple[Owned, ...]], locations: Mapping[str, Location]) -> list[tuple[Owned, ...]]:
    """Return groups in the order of their bytes in the files.

    Groups whose bytes interleave become one group, so that each group is one stretch of the files.
    """
    spans = []
    for group in groups:
        at = [(locations[name].file, locations[name].begin) for leaf, _ in group for name in leaf.view.tensors]
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


def files_by_writer(
    contents: Contents, request: SaveRequest, count: int, holding: Callable[[Leaf], Iterable[int]]
) -> tuple[Layout, list[int]]:
    """Return the files of a save by `count` processes, each of which has one writer, and the writers by number.

    The files are those that one process would write, but shorter and more, so that all processes write about equally
    much. A file has tensors that the same processes can write: those that can have all of its leaves, by `holding`.
    Raises `TensorMismatchError` if there are none.
    """
    everyone = frozenset(range(count))
    able: dict[str, frozenset[int]] = {}  # by tensor
    for leaf in contents.written if count > 1 else ():  # a single process can write all
        processes = frozenset(holding(leaf))
        for tensor in leaf.view.tensors:
            able[tensor] = able.get(tensor, processes) & processes
    layout = contents.layout(request.max_file_bytes, request.options.alignment, able, count)
    loads = [0] * count
    writers = [0] * len(layout.files)
    # The longest files first, each to the process with the fewest bytes.
    for number, (name, header) in sorted(enumerate(layout.files), key=lambda file: (-file[1][1].file_bytes, file[0])):
        common = everyone.intersection(*{able.get(tensor, everyone) for tensor in header.tensors})
        if not common:
            raise TensorMismatchError(
                f"{name}: no process holds parts of all leaves that are stored in {some(list(header.tensors))}; shard "
                "them over the same devices"
            )
        writers[number] = min(common, key=lambda process: (loads[process], process))
        loads[writers[number]] += header.file_bytes
    return layout, writers
