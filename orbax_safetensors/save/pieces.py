"""Saving pieces of tensors from several processes to a store whose files each have one writer.

Every process writes its own files, in the form of PyTorch's sharded checkpoints: if several processes hold shards of a
tensor, it is in several files, whose metadata says where each piece belongs. Devices send nothing to each other, and
every process writes the bytes that it would write into shared files. The name of each file has the total number of
files, so that a reader notices a missing one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from orbax_safetensors.checkpoint.family import TensorTypes
from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import all_gather
from orbax_safetensors.format.dtypes import from_numpy
from orbax_safetensors.format.header import Header
from orbax_safetensors.format.layout import Layout, file_names, free_names
from orbax_safetensors.format.sharding_info import sharding_info
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.pieces import TensorPiece, in_pieces
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Location, locations

Views = Mapping[tuple[str, Box], View]  # by a leaf's name and a box of the leaf


def files_of_process(
    owned: Sequence[tuple[Leaf, tuple[Box, ...]]],
    tensors: TensorTypes,
    metadata: Mapping[str, str],
    *,
    max_file_bytes: int,
    alignment: int,
    process: int,
) -> tuple[list[Header], list[dict[str, str]], Views]:
    """Return the files in which a process writes `owned`: their headers, the piece of each tensor in each, the views.

    Raises `MappingError` if the part of a tensor that the process holds is not a set of boxes.
    """
    boxes = [(leaf, box) for leaf, boxes_of_leaf in owned for box in boxes_of_leaf]
    views, pieces = in_pieces(
        [leaf.view.slice(*box.slices) for leaf, box in boxes],
        {name: shape for name, (_, shape) in tensors.items()},
    )
    if process == 0:  # a tensor without elements has no shards
        for name, (_, shape) in tensors.items():
            if 0 in shape:
                pieces[f"0/{name}"] = TensorPiece(name, Box.whole(shape))
    files: list[dict[str, str]] = []
    filled: list[int] = []
    order = {name: number for number, name in enumerate(tensors)}
    current: dict[int, int] = {}  # the file for nth pieces of tensors: a file has at most one piece of each tensor
    for name, piece in sorted(pieces.items(), key=lambda item: (order[item[1].tensor], item[0])):
        nth = int(name.partition("/")[0])
        nbytes = _nbytes(piece, tensors)
        at = current.get(nth)
        if at is None or filled[at] + nbytes > max_file_bytes:
            at = current[nth] = len(files)
            files.append({})
            filled.append(0)
        files[at][piece.tensor] = name
        filled[at] += nbytes
    headers = [
        Header.layout(
            [(tensor, from_numpy(tensors[tensor][0]), pieces[name].box.shape) for tensor, name in contents.items()],
            {
                **metadata,
                **sharding_info({tensor: pieces[name].box.start for tensor, name in contents.items()}),
            },
            alignment=alignment,
        )
        for contents in files
    ]
    return headers, files, {(leaf.name, box): view for (leaf, box), view in zip(boxes, views, strict=True)}


def places_in(headers: Sequence[Header], files: Sequence[Mapping[str, str]]) -> Mapping[str, Location]:
    """Return where the pieces of `files_of_process` lie."""
    return {
        contents[tensor]: place._replace(file=number)
        for number, (contents, header) in enumerate(zip(files, headers, strict=True))
        for tensor, place in locations(unnamed([header])).items()
    }


def unnamed(headers: Sequence[Header]) -> Layout:
    """Return a layout of files without names; `numbered` adds these once it knows the number of all files."""
    return Layout(tuple(("", header) for header in headers), None)


def numbered(key: str, layout: Layout, active: ActiveProcesses, taken: Collection[str]) -> Layout:
    """Return the files of this process with names that are not `taken`, numbered among the files of all processes."""
    counts = [int(count) for count in all_gather(f"{key}/files", str(len(layout.files)), active)]
    before = sum(counts[: active.rank])
    names = free_names(file_names(sum(counts)), taken)[before : before + len(layout.files)]
    return Layout(tuple((name, header) for name, (_, header) in zip(names, layout.files, strict=True)), None)


def _nbytes(piece: TensorPiece, tensors: TensorTypes) -> int:
    return piece.box.volume * tensors[piece.tensor][0].itemsize
