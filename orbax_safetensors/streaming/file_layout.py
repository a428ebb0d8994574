"""Layouts of tensors in files: whole tensors as Hugging Face has them, or pieces as PyTorch has, a file per device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax

from orbax_safetensors.format.dtypes import DType, in_memory_type
from orbax_safetensors.format.header import Header
from orbax_safetensors.format.layout import Layout
from orbax_safetensors.format.sharding_info import file_name, sharding_info
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Location, locations

Tensors = Mapping[str, tuple[DType, tuple[int, ...]]]  # as they are stored


@dataclass(frozen=True)
class Files:
    """Files to write: their layout, where tensors lie in them, and for each leaf the view of those tensors."""

    layout: Layout
    locations: Mapping[str, Location]
    views: Mapping[str, View]

    @classmethod
    def of(cls, layout: Layout, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Files:
        """Return files of whole tensors, which are the leaves."""
        views = {name: View.tensor(name, leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        return cls(layout, locations(layout), views)

    def digest(self, identity: str, model_files: object, units: Iterable[object]) -> str:
        """Return a digest of the units, their places in the files, the source and the model's files.

        `identity` is that of the source; a `repr` identifies units and model files.
        """
        views = sorted(self.views.items())
        hashed = hashlib.sha256(f"{identity}\0{model_files}\0{views}\0".encode("utf-8", "backslashreplace"))
        for name, header in self.layout.files:
            hashed.update(f"{name}\0".encode())
            hashed.update(header.encoded)
        for unit in units:
            hashed.update(repr(unit).encode("utf-8", "backslashreplace"))
        return hashed.hexdigest()


def in_pieces(
    tensors: Tensors, boxes: Mapping[str, Sequence[Box]], metadata: Mapping[str, str], alignment: int
) -> Files:
    """Return a file for each device. `boxes` has for every tensor the box of every device.

    If several devices have a box, the file of the device with the fewest bytes so far gets it. Leaves are the tensors
    as memory holds them.
    """
    count = max(map(len, boxes.values()), default=1)
    written_bits = [0] * count
    pieces: list[dict[str, Box]] = [{} for _ in range(count)]
    for name, device_boxes in boxes.items():
        holders: dict[Box, list[int]] = {}
        for device, box in enumerate(device_boxes):
            holders.setdefault(box, []).append(device)
        for box, devices in holders.items():
            writer = min(devices, key=lambda device: (written_bits[device], device))
            written_bits[writer] += box.volume * tensors[name][0].bits
            pieces[writer][name] = box
    written = [file_boxes for file_boxes in pieces if file_boxes]
    files, tensor_locations = [], {}
    parts: dict[str, list[tuple[tuple[int, ...], View]]] = {name: [] for name in tensors}
    for number, file_boxes in enumerate(written):
        offsets = {name: box.start for name, box in file_boxes.items()}
        header = Header.layout(
            [(name, tensors[name][0], box.shape) for name, box in file_boxes.items()],
            {**metadata, **sharding_info(offsets)},
            alignment=alignment,
        )
        files.append((file_name(number), header))
        for name, entry in header.tensors.items():
            shape, dtype = in_memory_type(entry.dtype, entry.shape)
            key = f"{number}/{name}"
            tensor_locations[key] = Location(number, header.data_start + entry.begin, dtype)
            parts[name].append((offsets[name], View.tensor(key, shape, dtype)))
    views = {name: View.tile(in_memory_type(*tensors[name])[0], tiled) for name, tiled in parts.items()}
    return Files(Layout(tuple(files), None), tensor_locations, views)
