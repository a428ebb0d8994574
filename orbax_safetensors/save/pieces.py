"""Saving from several processes to a store whose files each have one writer: every process writes files of its own.

They are in the form of PyTorch's sharded checkpoints: a tensor that several processes have shards of is in several
files, whose metadata says where each piece belongs. Nothing is sent between devices, and every process writes what it
would write of shared files. The files count all others in their names, so that none can be missing unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from orbax_safetensors.checkpoint.family import TensorTypes
from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.agreement import all_gather
from orbax_safetensors.format.dtypes import from_numpy
from orbax_safetensors.format.header import Header
from orbax_safetensors.format.layout import Layout, file_names
from orbax_safetensors.format.sharding_info import sharding_info
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.pieces import TensorPiece, in_pieces
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Location, locations

Views = Mapping[tuple[str, Box], View]  # of the boxes of leaves, by the leaf's name


def own_files(
    owned: Sequence[tuple[Leaf, tuple[Box, ...]]],
    tensors: TensorTypes,
    metadata: Mapping[str, str],
    *,
    max_file_bytes: int,
    alignment: int,
    process: int,
) -> tuple[list[Header], list[dict[str, str]], Views]:
    """The headers of the files that a process writes `owned` into, by tensor the pieces in each, and its views.

    Raises `MappingError` where what it holds of a tensor is no set of boxes.
    """
    boxes = [(leaf, box) for leaf, own in owned for box in own]
    views, pieces = in_pieces(
        [leaf.view.slice(*box.slices) for leaf, box in boxes],
        {name: shape for name, (_, shape) in tensors.items()},
    )
    if process == 0:  # what has no elements has no shards either
        for name, (_, shape) in tensors.items():
            if 0 in shape:
                pieces[f"0/{name}"] = TensorPiece(name, Box.whole(shape))
    files: list[dict[str, str]] = []
    filled: list[int] = []
    order = {name: number for number, name in enumerate(tensors)}
    current: dict[int, int] = {}  # by how many pieces of their tensors come before: a file has one of each tensor
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
            [(tensor, from_numpy(tensors[tensor][0]), pieces[name].box.shape) for tensor, name in own.items()],
            {
                **metadata,
                **sharding_info({tensor: pieces[name].box.start for tensor, name in own.items()}),
            },
            alignment=alignment,
        )
        for own in files
    ]
    return headers, files, {(leaf.name, box): view for (leaf, box), view in zip(boxes, views, strict=True)}


def places_in(headers: Sequence[Header], files: Sequence[Mapping[str, str]]) -> Mapping[str, Location]:
    """Where the pieces of `own_files` lie."""
    return {
        own[tensor]: place._replace(file=number)
        for number, (own, header) in enumerate(zip(files, headers, strict=True))
        for tensor, place in locations(unnamed([header])).items()
    }


def unnamed(headers: Sequence[Header]) -> Layout:
    """Files whose names depend on how many others there are: `numbered` finds out."""
    return Layout(tuple(("", header) for header in headers), None)


def numbered(key: str, layout: Layout) -> Layout:
    """The files of this process with their names among those of all others."""
    counts = [int(count) for count in all_gather(f"{key}/files", str(len(layout.files)))]
    before = sum(counts[: jax.process_index()])
    names = file_names(sum(counts))[before : before + len(layout.files)]
    return Layout(tuple((name, header) for name, (_, header) in zip(names, layout.files, strict=True)), None)


def _nbytes(piece: TensorPiece, tensors: TensorTypes) -> int:
    return piece.box.volume * tensors[piece.tensor][0].itemsize
