"""Trees of models: how their leaves are sharded, and what they are in NumPy.

Nothing here uses the package that is measured. `maxtext_reference.py` says what NumPy makes of the stored tensors; the
tests compare it with MaxText's own converter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from checkpoints import BLOCK, DTYPES, read_header
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from maxtext_reference import parameters

_SCALES, _PACKED = "_scale_inv", "_packed"
_PARAMETERS = (_SCALES, ".weight_scale", ".weight_shape")
BF16 = DTYPES["BF16"]
# The dimensions of stored tensors and of leaves, by how their names end. Others are vectors of the model's width.
_DIMENSIONS = {
    r"(embed_tokens|lm_head)\.weight|embedding": ("vocabulary", "width"),
    r"logits_dense\.kernel": ("width", "vocabulary"),
    r"(q|k|v)_proj\.weight": ("heads", "width"),
    r"o_proj\.weight": ("width", "heads"),
    r"(query|key|value)\.kernel": ("width", "heads", "head"),
    r"out\.kernel": ("heads", "head", "width"),
    r"kv_a_proj_with_mqa\.weight": ("rank", "width"),
    r"kv_b_proj\.weight": ("heads", "rank"),
    r"wkv_a\.kernel": ("width", "rank"),
    r"wkv_b\.kernel": ("rank", "heads", "head"),
    r"(gate|up)_proj\.weight": ("hidden", "width"),
    r"down_proj\.weight": ("width", "hidden"),
    r"wi_[01]\.kernel": ("width", "hidden"),
    r"wo\.kernel": ("hidden", "width"),
    r"mlp\.gate\.weight": ("router", "width"),
    r"gate\.kernel": ("width", "router"),
    r"wi_[01]": ("experts", "width", "hidden"),
    r"wo": ("experts", "hidden", "width"),
    r"(gate\.bias|e_score_correction_bias)": ("router",),
    r"(query_norm\.scale|key_norm\.scale|[qk]_norm\.weight)": ("head",),
    r"(kv_norm\.scale|kv_a_layernorm\.weight)": ("rank",),
    rf".*{_SCALES}": ("blocks", "blocks"),
}
# What is cut: the first of these dimensions that a leaf has.
LAYOUTS = {
    "width": ("width",),
    "heads": ("heads", "hidden", "vocabulary"),
    "experts": ("experts", "width"),
}


def shardings(shapes: Mapping[str, tuple[int, ...]], layout: str, mesh: Mesh) -> dict[str, Sharding]:
    """How leaves, or stored tensors, are sharded over a mesh of one axis. Both hold the same numbers on each device.

    Where experts are sharded, stored ones are whole on the device that has theirs.
    """
    (axis,) = mesh.axis_names
    numbers = {name: int(found[1]) for name in shapes if (found := re.search(r"\.experts\.(\d+)\.", name))}
    count = max(numbers.values(), default=0) + 1
    out: dict[str, Sharding] = {}
    for name, shape in shapes.items():
        if layout == "experts" and name in numbers:
            out[name] = SingleDeviceSharding(mesh.devices[numbers[name] * mesh.size // count])
            continue
        dimensions = _dimensions(name)
        if len(shape) > len(dimensions):  # layers are stacked
            dimensions = (*dimensions[:1], "layers", *dimensions[1:])
        assert len(shape) == len(dimensions), name
        cut = next((dimension for dimension in LAYOUTS[layout] if dimension in dimensions), None)
        spec = PartitionSpec(*(axis if dimension == cut else None for dimension in dimensions))
        out[name] = NamedSharding(mesh, spec)
    return out


def _dimensions(name: str) -> tuple[str, ...]:
    matching = (found for ending, found in _DIMENSIONS.items() if re.fullmatch(rf"(.*\.)?({ending})", name))
    return next(matching, ("width",))


def map_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint as views of the mapped files."""
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        text, at = read_header(path)
        data = np.memmap(path, np.uint8, "r")
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                values = data[at + begin : at + end].view(DTYPES[entry["dtype"]])
                out[name] = np.asarray(values.reshape(entry["shape"]))
    return out


class Decoded(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint, fp8 in blocks and int4 in groups as `dtype`, decoded whenever they are asked for."""

    def __init__(self, stored: Mapping[str, np.ndarray], dtype: np.dtype = BF16) -> None:
        self._stored, self._dtype = stored, dtype

    def __iter__(self) -> Iterator[str]:
        return (name.removesuffix(_PACKED) for name in self._stored if not name.endswith(_PARAMETERS))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> np.ndarray:
        if name + _PACKED in self._stored:
            pairs, scales = self._stored[name + _PACKED].view(np.uint8), self._stored[name + "_scale"]
            values = np.stack([pairs & 15, pairs >> 4], -1).reshape(*scales.shape, -1).astype(np.float32)
            values -= 8
            values *= scales.astype(np.float32)[..., None]
            return values.astype(self._dtype).reshape(len(pairs), -1)
        values = self._stored[name]
        block_scales = self._stored.get(name + _SCALES)
        if block_scales is None:
            return values
        rows, columns = values.shape
        factors = np.repeat(np.repeat(block_scales, BLOCK, 0)[:rows], BLOCK, 1)[:, :columns]
        return (values.astype(np.float32) * factors).astype(self._dtype)


def leaves(directory: Path, family: str, decoded: np.dtype = BF16) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a family's tree, whole, with their paths, computed from values that are decoded as `decoded`."""
    config = json.loads((directory / "config.json").read_text())
    stored = Decoded(map_tensors(directory), decoded)
    for parameter in parameters(family.removeprefix("maxtext."), config, stored):
        yield parameter.path.replace("-", "."), parameter.made()


def materialised(directory: Path, family: str) -> dict[str, np.ndarray]:
    """The same, all at once."""
    return dict(leaves(directory, family))
