"""File units: the tiles of each file, for stores where a file has one writer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.strided import extent
from orbax_safetensors.geometry.tiling import storage_order, tile_shape, tiles
from orbax_safetensors.geometry.view import View
from orbax_safetensors.streaming.bundles import interleaved
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.pipeline import Bundle, Tile, TileSource


@dataclass(frozen=True)
class FileUnit:
    """The tiles of one file in the order of its bytes, and of each leaf the view of the tensors in the file."""

    bundles: tuple[Bundle, ...]
    views: Mapping[str, View]


def file_units(files: Files, source: TileSource, limit: int) -> Iterator[FileUnit]:
    """Yield the unit of each file, in tiles of at most `limit` bytes."""
    views: list[dict[str, View]] = [{} for _ in files.layout.files]
    for name, view in files.views.items():
        numbers = [files.locations[piece.tensor].file if piece.tensor else None for piece in view.pieces]
        for number in {number for number in numbers if number is not None}:
            pieces = tuple(piece for piece, of in zip(view.pieces, numbers, strict=True) if of == number)
            views[number][name] = replace(view, pieces=pieces)
    for of_file in views:
        cuts: list[tuple[int, Bundle]] = []
        for names in interleaved(of_file):
            elements = {name: limit // len(names) // source.leaves[name].dtype.itemsize for name in names}
            boxes = [list(_boxes(of_file[name], elements[name])) for name in names]
            if len(set(map(tuple, boxes))) == 1:  # the leaves' elements lie beside each other
                bundles = [tuple(Tile(name, box) for name in names) for box in boxes[0]]
            else:
                bundles = [(Tile(name, box),) for name, of_leaf in zip(names, boxes, strict=True) for box in of_leaf]
            cuts += [
                (min(_first_byte(of_file[tile.name], tile.box, files) for tile in bundle), bundle) for bundle in bundles
            ]
        yield FileUnit(tuple(bundle for _, bundle in sorted(cuts)), of_file)


def _boxes(view: View, limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` elements that the pieces of a view make up."""
    pieces = [
        Box((start, start + extent(modes)) for start, modes in zip(piece.start, piece.dims, strict=True))
        for piece in view.pieces
    ]
    hull = Box.hull(pieces)
    order = storage_order(view)
    for whole in [hull] if hull.volume == sum(piece.volume for piece in pieces) else pieces:
        shape = whole.shape
        for box in tiles(shape, tile_shape(shape, (1,) * len(shape), order, max(limit, 1)), order):
            yield Box((low + first, low + last) for low, (first, last) in zip(whole.start, box, strict=True))


def _first_byte(view: View, box: Box, files: Files) -> int:
    """Return the offset in its file of the first element of a box; 0 if no element lies in a file."""
    begins = (
        files.locations[name].begin + copy.source * files.locations[name].dtype.itemsize
        for name, copy, _ in view.copies(box, box.shape)
        if name is not None
    )
    return min(begins, default=0)
