"""`Checkpoint`: the tensors of safetensors files, as they are stored or as a family makes a model's tree of them."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from orbax_safetensors.checkpoint.files import Finding, StoredFile
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import DType, in_memory_type
from orbax_safetensors.format.header import TensorEntry
from orbax_safetensors.format.layout import ADAPTER_STEM, STEM, USUAL_STEMS, file_stem
from orbax_safetensors.format.names import hint
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.family import NO_FAMILY, FamilyUse, StateWrapper
from orbax_safetensors.mapping.quantized_tensor import Quantized
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.store import File, RequestLimits, Store
from orbax_safetensors.transfer.plan import Block, Location, TransferPlan, transfer_plan

# Between a tensor's name and the number of its piece, if a view has several. No header can hold this character, so no
# tensor has the name of a piece.
_PIECE = "\ud800"
# After the name of a stored tensor, as a view names its bytes.
_BYTES = "\ud801"

_UINT8, _FLOAT32, _BFLOAT16 = np.dtype(np.uint8), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


class StoredPiece(NamedTuple):
    """A tensor of a file: `file` is its position in `Checkpoint.files`, `start` where it begins in the whole tensor."""

    file: int
    entry: TensorEntry
    start: tuple[int, ...]


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, in one piece except in PyTorch's sharded files, where its pieces tile it."""

    stored_dtype: DType
    stored_shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in memory: as stored, or packed if an element is less than a byte."""
        return in_memory_type(self.stored_dtype, self.stored_shape)[0]

    @property
    def dtype(self) -> np.dtype:
        """Return the NumPy dtype in memory: `uint8` if an element is less than a byte."""
        return self.stored_dtype.in_memory

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return sum(piece.entry.nbytes for piece in self.pieces)

    @property
    def file(self) -> int:
        """Return the position in `Checkpoint.files` of the file that has the tensor, or its first piece."""
        return self.pieces[0].file


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a file or a directory, by name, in the order of the files and of their bytes in them.

    ```python
    checkpoint = ost.open_checkpoint("/models/llama")
    tensor = checkpoint["model.norm.weight"]
    print(tensor.shape, tensor.dtype, checkpoint.files[tensor.file].path)
    ```

    Attributes:
      mapped: what a family makes of the tensors, by path in the model's tree; None without a family.
      use: that family and its switches.
      wrapper: the tree around its tree in a checkpoint of Orbax.
      quantized: tensors that are decoded, by name.
      decoded_dtype: the dtype of decoded tensors, unless a caller asks for another.
      open_requests: how many opened it: for the listing, the index and the headers.
      index_name: the name of the index beside the files, if there is one.
      omitted: tensors of the files that the index does not name, by name; no load returns them.
      delta_of: the number of the version that the files change; None unless they are a delta.
      findings: what `verify` says of files and tensors that no load reads.
    """

    path: str
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, StoredTensor]
    store: Store
    mapped: Mapping[str, View] | None = None
    use: FamilyUse = NO_FAMILY
    wrapper: StateWrapper = field(default_factory=StateWrapper)
    quantized: Mapping[str, Quantized] = field(default_factory=dict)
    decoded_dtype: np.dtype = _BFLOAT16
    open_requests: int = 0
    index_name: str | None = None
    omitted: Mapping[str, StoredTensor] = field(default_factory=dict)
    delta_of: str | None = None
    findings: tuple[Finding, ...] = ()

    @cached_property
    def leaves(self) -> Mapping[str, View]:
        """Return what can be restored, by name: the stored tensors, or the leaves that a family makes of them."""
        return {name: self.view(name) for name in self.tensors} if self.mapped is None else self.mapped

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Return the `__metadata__` of all files; the first file that has a key gives its value."""
        return {key: text for file in reversed(self.files) for key, text in file.header.metadata.items()}

    @cached_property
    def fingerprints(self) -> dict[str, Mapping[str, Any]]:
        """Return what tells whether the files are still the same, by the name of each file."""
        return {posixpath.basename(file.path): file.fingerprint for file in self.files}

    @property
    def is_file(self) -> bool:
        """Return whether `path` is that of one file, and not of a directory."""
        return self.files[0].path == self.path

    @property
    def directory(self) -> str:
        """Return the path of the directory that the files are in."""
        return posixpath.dirname(self.path) if self.is_file else self.path

    @property
    def stem(self) -> str:
        """Return what the names of all files begin with.

        If they differ, or one file is passed whose name says nothing, it is what those of a model begin with.
        """
        stems = {file_stem(posixpath.basename(file.path)) for file in self.files}
        (stem,) = stems if len(stems) == 1 else {STEM}
        return STEM if self.is_file and stem not in USUAL_STEMS else stem

    @property
    def is_adapter(self) -> bool:
        """Return whether the only file is that of a PEFT adapter, by its name."""
        return self.stem == ADAPTER_STEM

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_omitted(self) -> Checkpoint:
        """Return the checkpoint with all tensors of its files, also those that the index does not name."""
        return replace(self, tensors={**self.tensors, **self.omitted}, omitted={})

    def tree(self, leaf: Callable[[str, View], Any]) -> dict[str, Any]:
        """Return `leaf(name, view)` of all leaves: in a flat dict by stored name, or nested as the family has them."""
        if self.mapped is None:
            return {name: leaf(name, view) for name, view in self.leaves.items()}
        tree: dict[str, Any] = {}
        for path, view in self.mapped.items():
            *parents, last = path.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = leaf(path, view)
        return tree

    def __getitem__(self, name: str) -> StoredTensor:
        """Return the tensor `name`; raises `TensorMismatchError` if there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorMismatchError(f"{self.path}: there is no tensor {name!r}{hint(name, self.tensors)}") from None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor that has a view; tensors that encode others have none."""
        encoding = {name for tensor in self.quantized.values() for name in tensor.stored}
        plain = {name: tensor.shape for name, tensor in self.tensors.items() if name not in encoding}
        return plain | {name: tensor.shape for name, tensor in self.quantized.items()}

    def view(self, name: str) -> View:
        """Return a view of the tensor `name` with an array's dtype and shape; `location` has its files and offsets."""
        if name in self.quantized:
            return self.quantized[name].view(self.decoded_dtype)
        tensor = self[name]
        if len(tensor.pieces) == 1:
            return View.tensor(name, *in_memory_type(tensor.stored_dtype, tensor.stored_shape))
        parts = [
            (piece.start, View.tensor(_key(name, number), piece.entry.shape, tensor.dtype))
            for number, piece in enumerate(tensor.pieces)
        ]
        return View.tile(tensor.shape, parts)

    def whole(self, name: str) -> str:
        """Return the name of the tensor that a view's tensor is, or is a piece of."""
        return name if name in self.quantized or name in self.tensors else name.rpartition(_PIECE)[0]

    def codes(self, name: str) -> str:
        """Return the name of the stored tensor that a view's tensor is, is a piece of, or is decoded from."""
        return self.quantized[name].codes if name in self.quantized else self.whole(name)

    def as_bytes(self, name: str) -> tuple[str, ...]:
        """Return what views call the bytes of a view's tensor: of its codes and parameters if it has any."""
        stored = self.quantized[name].stored if name in self.quantized else (name,)
        return tuple([f"{each}{_BYTES}" for each in stored])

    def location(self, name: str) -> Location:
        """Return where a tensor lies, or a piece of a tensor as a view names it, or the bytes of either."""
        if name.endswith(_BYTES):
            return Location(*self._begin(name.removesuffix(_BYTES)), _UINT8)
        if name in self.quantized:
            quantized = self.quantized[name]
            beside = tuple([self._begin(stored) for stored in quantized.parameters])
            return Location(*self._begin(quantized.codes), _FLOAT32, quantized.encoding, beside)
        tensor, (file, entry, _) = self._piece(name)
        return Location(file, self.files[file].header.data_start + entry.begin, tensor.dtype)

    def _begin(self, name: str) -> tuple[int, int]:
        """Return the file of a stored tensor, and the offset of its first byte."""
        _, (file, entry, _) = self._piece(name)
        return file, self.files[file].header.data_start + entry.begin

    def _piece(self, name: str) -> tuple[StoredTensor, StoredPiece]:
        tensor = self.tensors.get(name)
        if tensor is not None:
            return tensor, tensor.pieces[0]
        whole, _, number = name.rpartition(_PIECE)
        return self[whole], self[whole].pieces[int(number)]

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a tensor in one piece, at most `most`; raises `TensorMismatchError` if there are more."""
        tensor, (number, entry, _) = self._piece(name)
        if entry.nbytes > most or len(tensor.pieces) > 1:
            raise TensorMismatchError(f"{self.path}: {name!r}: expected at most {most} bytes, found {tensor.nbytes}")
        content = bytearray(entry.nbytes)
        with closing(self.open_file(number)) as file:
            file.read([(self.files[number].header.data_start + entry.begin, [memoryview(content)])])
        return bytes(content)

    def request_limits(self, options: SafetensorsOptions) -> RequestLimits:
        """Return the limits of the requests of a restore."""
        return self.store.cost.request_limits(options.threads, options.max_gap_bytes, options.in_flight_bytes)

    def transfer(self, blocks: Sequence[Block], limits: RequestLimits) -> TransferPlan:
        """Plan the reading of blocks, whose views are of tensors that `location` knows."""
        return transfer_plan(blocks, self.location, limits.max_gap_bytes, limits.max_request_bytes)

    def open_file(self, index: int) -> File:
        """Open a file to read tensors; raises `StorageError` if it has changed since its header was read."""
        stored = self.files[index]
        return self.store.open(stored.path, stored.stamp)


def _key(name: str, number: int) -> str:
    return f"{name}{_PIECE}{number}"
