"""Reading: bytes of files become elements of blocks, straight, scattered, reordered, cast or decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.coalesce import Encoded, Staged
from orbax_safetensors.geometry.elementwise import apply
from orbax_safetensors.storage.direct import DirectStore
from orbax_safetensors.storage.mapping import LeasedMapping
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.storage.store import File, Stamp, Store
from orbax_safetensors.transfer.decode import decode
from orbax_safetensors.transfer.engine import Task, Transfer, Window, of_window
from orbax_safetensors.transfer.leases import Leases
from orbax_safetensors.transfer.plan import Block, Constant, TransferPlan, same_bits
from orbax_safetensors.transfer.scatter import places
from orbax_safetensors.transfer.strided_copy import assign, copy_applying, elements
from orbax_safetensors.transfer.sums import Sums

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def memory_for(plan: TransferPlan, blocks: Sequence[Block], store: Store) -> list[np.ndarray]:
    """Return memory for `blocks`; if `store` reads directly, it lies in its pages as the bytes do in the files."""
    return allocate([block.nbytes for block in blocks], direct_offsets(plan, store))


def direct_offsets(plan: TransferPlan, store: Store) -> dict[int, int]:
    """Return where the bytes of blocks lie in files, by the number of the block, if `store` reads directly."""
    offsets: dict[int, int] = {}
    for extent in plan.extents if isinstance(store, DirectStore) else ():
        at = extent.begin
        for block, offset, nbytes in extent.parts:
            offsets.setdefault(block, at - offset)
            at += nbytes
    return offsets


class Reader(Transfer[File]):
    """Fills memory from files."""

    def __init__(self, open_file: Callable[[int], File], threads: int, sums: Sums | None = None) -> None:
        """See `Transfer`."""
        super().__init__(open_file, threads, sums)
        self._mappings: dict[int, memoryview] = {}
        self.leases = Leases()

    def _requests(self, plan: TransferPlan, blocks: Sequence[Block], memory: Sequence[np.ndarray]) -> Iterator[Task]:
        for constant in plan.constants:
            _fill(constant, blocks[constant.end.block], memory[constant.end.block])
        yield from super()._requests(plan, blocks, memory)

    def map(self, number: int) -> memoryview:
        """Return a whole file as memory, the same memory for every caller."""
        mapping = self._mappings.get(number)
        if mapping is None:
            mapping = self._mappings[number] = self._file(number).map()
        return mapping

    def answer(self, number: int, offset: int, nbytes: int) -> np.ndarray | None:
        """Return bytes of a file in the memory of the answer to one request; None if its store has no such memory."""
        answer = self._file(number).answer(offset, nbytes)
        if answer is None:
            return None
        self._count(1, nbytes)
        if self.sums is not None:
            self.sums.add_buffers(number, offset, [answer])
        return np.frombuffer(answer, np.uint8)

    def lease(self, number: int) -> LeasedMapping | None:
        """Return a file mapped under a read lease, as `Leases.hold` does."""
        return self.leases.hold(number, self._file(number))

    def populate(self, number: int, begin: int, end: int) -> None:
        """Bring bytes of a leased file into memory."""
        self.leases.populate(number, begin, end)
        self._count(1, end - begin)

    def close(self) -> None:
        """See `Transfer`."""
        self.leases.close()
        super().close()

    def check(self, stamps: Mapping[int, Stamp]) -> None:
        """Raise `StorageError` if a file that was opened has changed since its stamp was taken."""
        for number, file in self._files.items():
            file.check(stamps[number])

    def _move(self, file: File, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        file.read(ranges)

    def _staged(self, window: Window, access: Staged) -> None:
        if isinstance(access, Encoded):
            decoded, stored = self._decoded(window, access)
            per_byte = access.encoding.elements_per_byte
            copies = self._copies(window, access, decoded, stored, window.low * per_byte, window.high * per_byte)
        else:
            stored = window.part.location.dtype
            packed = self._answer(window)
            if packed is None:
                if self._scattered(window, access):
                    return
                packed = self._staging(window.high - window.low, window.offset)
                self._runs(window, packed)
            low, high = window.low // stored.itemsize, window.high // stored.itemsize
            copies = self._copies(window, access, packed, stored, low, high)
        for copy in copies:
            if copy.same_bits:
                assign(copy.dense, copy.packed)
                continue
            try:
                lossless = window.blocks[copy.end.block].lossless
                copy_applying(copy.packed, copy.dense, copy.end.ops, lossless=lossless)
            except TensorMismatchError as error:
                path = self._file(window.part.file).path
                raise TensorMismatchError(f"{path}: {window.part.tensor!r}: {error}") from None

    def _scattered(self, window: Window, access: Staged) -> bool:
        """Read a window straight into place; return False, and read nothing, if that is not possible or not faster."""
        location = window.part.location
        ends = [window.part.ends[use.buffer] for use in access.uses]
        if (
            self.sums is not None
            or access.runs.modes
            or not all(same_bits(end.ops, location.dtype, window.blocks[end.block].dtype) for end in ends)
        ):
            return False
        itemsize = location.dtype.itemsize
        low, high = window.low // itemsize, window.high // itemsize
        copies = [
            (copy, window.memory[end.block])
            for use, end in zip(access.uses, ends, strict=True)
            for copy in of_window(use.copy, low, high)
        ]
        runs = places(copies, itemsize, window.high - window.low)
        if runs is None or not self._file(window.part.file).scatter(window.offset, runs):
            return False
        self._count(1, window.high - window.low)
        return True

    def _answer(self, window: Window) -> np.ndarray | None:
        """Return the bytes of a window in the memory of a store, if one request brings them there anyway."""
        nbytes = window.high - window.low
        return None if window.first_nbytes < nbytes else self.answer(window.part.file, window.offset, nbytes)

    def _decoded(self, window: Window, access: Encoded) -> tuple[np.ndarray, np.dtype]:
        """Return the elements of a window, as bytes, and their dtype: bfloat16 if all of its blocks have that dtype."""
        ends = [window.part.ends[use.buffer] for use in access.uses]
        wanted = {window.blocks[end.block].dtype if not end.ops else None for end in ends}
        dtype = _BFLOAT16 if wanted == {_BFLOAT16} else np.dtype(np.float32)
        scales = access.scales(window.low, window.high)
        code_bytes = window.high - window.low
        scale_bytes = sum(length for _, length in scales.ranges)
        buffer = self._staging(
            code_bytes * access.encoding.elements_per_byte * dtype.itemsize + scale_bytes + code_bytes
        )
        decoded, factors, codes = np.split(buffer, [buffer.size - scale_bytes - code_bytes, buffer.size - code_bytes])
        self._runs(window, codes)
        number, begin = window.part.location.scales
        self._pieces(number, ((begin + offset, length) for offset, length in scales.ranges), factors)
        decode(access.encoding, scales.segments, codes, factors, decoded.view(dtype))
        return decoded, dtype


def _fill(constant: Constant, block: Block, memory: np.ndarray) -> None:
    """Write elements that no tensor stores into memory that is all zeros."""
    zero = np.zeros(1, np.float64)
    if np.any(value := apply(constant.end.ops, zero)):
        _, dense = elements(constant.copy, zero.view(np.uint8), zero.dtype, memory, block.dtype)
        np.copyto(dense, value, casting="unsafe")
