"""Reading: bytes of files become elements of blocks, straight, scattered, reordered, cast or decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import ml_dtypes
import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.coalesce import Encoded, Staged
from orbax_safetensors.geometry.elementwise import apply
from orbax_safetensors.geometry.encoding import Area, Encoding, Patch, fields_apart
from orbax_safetensors.geometry.strided import Copy
from orbax_safetensors.storage.direct import DirectStore
from orbax_safetensors.storage.store import File, Store
from orbax_safetensors.transfer.decode import decode
from orbax_safetensors.transfer.engine import Transfer, Window, of_window, within
from orbax_safetensors.transfer.plan import Block, Constant, Part, TransferPlan, same_bits
from orbax_safetensors.transfer.scatter import destination_runs
from orbax_safetensors.transfer.strided_copy import assign, copy_applying, elements

_ParameterBytes = tuple[Patch, np.ndarray]  # with the bytes of the patch
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def direct_offsets(plan: TransferPlan, store: Store) -> dict[int, int]:
    """Return where the bytes of blocks lie in files, by the number of the block, if `store` reads directly.

    Memory for the blocks should lie in its pages as they do; see `allocate`.
    """
    offsets: dict[int, int] = {}
    for extent in plan.extents if isinstance(store, DirectStore) else ():
        at = extent.begin
        for block, offset, nbytes in extent.parts:
            offsets.setdefault(block, at - offset)
            at += nbytes
    return offsets


class Reader(Transfer[File]):
    """Fills memory from files."""

    def tasks(
        self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]
    ) -> Iterator[Callable[[], None]]:
        """See `Transfer`."""
        for constant in plan.constants:
            _write_constant(constant, blocks[constant.destination.block], memory[constant.destination.block])
        yield from (task.run for task in self._requests(plan, blocks, memory))

    def check(self) -> None:
        """Raise `StorageError` if a file has changed since it was opened."""
        for file in self._files.values():
            file.check(file.stamp)

    def _move(self, file: File, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        file.read(ranges)

    def _staged(self, window: Window, access: Staged) -> None:
        if isinstance(access, Encoded):
            areas = list(access.encoding.areas(access.runs, window.low, window.high))
            low, high = (access.encoding.elements_in(at) for at in (window.low, window.high))
            parts = within(access, low, high)
            apart = _apart(access.encoding, areas, parts)
            decoded, stored = self._decoded(window, access, areas, apart=apart is not None)
            copies = self._copies(window, access, decoded, stored, apart or parts)
        else:
            stored = window.part.location.dtype
            packed = self._answer(window)
            if packed is None:
                if self._scattered(window, access):
                    return
                packed = self._staging(window.high - window.low, window.offset)
                self._runs(window, packed)
            low, high = window.low // stored.itemsize, window.high // stored.itemsize
            copies = self._copies(window, access, packed, stored, within(access, low, high))
        for copy in copies:
            if copy.same_bits:
                assign(copy.dense, copy.packed)
                continue
            try:
                lossless = window.blocks[copy.destination.block].lossless
                copy_applying(copy.packed, copy.dense, copy.destination.ops, lossless=lossless)
            except TensorMismatchError as error:
                path = self.file(window.part.file).path
                raise TensorMismatchError(f"{path}: {window.part.tensor!r}: {error}") from None

    def _scattered(self, window: Window, access: Staged) -> bool:
        """Read a window straight into place; return False, and read nothing, if that is not possible or not faster."""
        location = window.part.location
        destinations = [window.part.destinations[use.buffer] for use in access.uses]
        if (
            self.sums is not None
            or access.runs.modes
            or not all(
                same_bits(destination.ops, location.dtype, window.blocks[destination.block].dtype)
                for destination in destinations
            )
        ):
            return False
        itemsize = location.dtype.itemsize
        low, high = window.low // itemsize, window.high // itemsize
        copies = [
            (copy.onward(destination.begin), window.memory[destination.block])
            for use, destination in zip(access.uses, destinations, strict=True)
            for copy in of_window(use.copy, low, high)
        ]
        runs = destination_runs(copies, itemsize, window.high - window.low)
        if runs is None or not self.file(window.part.file).scatter(window.offset, runs):
            return False
        self.count(1, window.high - window.low)
        return True

    def _answer(self, window: Window) -> np.ndarray | None:
        """Return the bytes of a window in the memory of a store, if one request brings them there anyway."""
        number, nbytes = window.part.file, window.high - window.low
        answer = self.file(number).fetch(window.offset, nbytes) if window.first_nbytes == nbytes else None
        if answer is None:
            return None
        self.count(1, nbytes)
        if self.sums is not None:
            self.sums.add_buffers(number, window.offset, [answer])
        return np.frombuffer(answer, np.uint8)

    def _decoded(
        self, window: Window, access: Encoded, areas: Sequence[Area], *, apart: bool
    ) -> tuple[np.ndarray, np.dtype]:
        """Return the elements of a window, as bytes, and their dtype: bfloat16 if all of its blocks have that dtype.

        With `apart`, they are in the order that `decode` says.
        """
        destinations = [window.part.destinations[use.buffer] for use in access.uses]
        wanted = {
            window.blocks[destination.block].dtype if not destination.ops else None for destination in destinations
        }
        dtype = _BFLOAT16 if wanted == {_BFLOAT16} else np.dtype(np.float32)
        patches = access.patches(areas)
        code_bytes, encoding = window.high - window.low, access.encoding
        decoded_bytes = encoding.elements_in(code_bytes) * dtype.itemsize
        sizes = [patch.nbytes for patch in patches.values()]
        buffer = self._staging(decoded_bytes + sum(sizes) + code_bytes)
        decoded, *held, codes = np.split(buffer, np.cumsum([decoded_bytes, *sizes]))
        self._runs(window, codes)
        read = dict(window.shared.get(partial(self._shared, window.part, access)))
        for (number, patch), memory in zip(patches.items(), held, strict=True):
            read[number] = self._parameter(window.part, number, patch, memory)
        parameters = [read[number] for number in range(len(read))]
        elements, done = decoded.view(dtype), 0
        for area in areas:
            end = done + len(area.rows) * area.width
            try:
                decode(
                    encoding,
                    area,
                    codes[encoding.bytes_of(done) : encoding.bytes_of(end)],
                    parameters,
                    elements[done:end],
                    apart=apart,
                )
            except TensorMismatchError as error:
                path = self.file(window.part.file).path
                raise TensorMismatchError(f"{path}: {window.part.tensor!r}: {error}") from None
            done = end
        return decoded, dtype

    def _shared(self, part: Part, access: Encoded) -> dict[int, _ParameterBytes]:
        """Read what all windows of a part need of parameters."""
        return {
            number: self._parameter(part, number, patch, np.empty(patch.nbytes, np.uint8))
            for number, patch in access.shared.items()
        }

    def _parameter(self, part: Part, number: int, patch: Patch, memory: np.ndarray) -> _ParameterBytes:
        file, begin = part.location.parameters[number]
        self._pieces(file, [(begin + offset, nbytes) for offset, nbytes in patch.ranges], memory)
        return patch, memory


def _apart(
    encoding: Encoding, areas: Sequence[Area], parts: Sequence[Sequence[Copy]]
) -> Sequence[Sequence[Copy]] | None:
    """Return the copies `parts` of elements that are decoded `apart`; None if they cannot be, or need not."""
    fields = encoding.rows_in_word
    if fields == 1 or len(areas) > 1:
        return None
    apart = [[fields_apart(copy, fields, areas[0].width // fields) for copy in copies] for copies in parts]
    possible = [[copy for copy in copies if copy is not None] for copies in apart]
    return possible if possible == apart else None


def _write_constant(constant: Constant, block: Block, memory: np.ndarray) -> None:
    """Write elements that no tensor stores into memory that is all zeros."""
    zero = np.zeros(1, np.float64)
    if np.any(value := apply(constant.destination.ops, zero)):
        copy = constant.copy.onward(constant.destination.begin)
        _, dense = elements(copy, zero.view(np.uint8), zero.dtype, memory, block.dtype)
        np.copyto(dense, value, casting="unsafe")
