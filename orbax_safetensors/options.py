"""The knobs of a transfer and their defaults. They are set at the public entries; inner functions require them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from orbax_safetensors.errors import SafetensorsError


def _default_threads() -> int:
    # Two threads saturate memory with a warm page cache; a cold disk wants more requests in flight than that.
    return min(16, 2 * (os.cpu_count() or 1))


@dataclass(frozen=True, kw_only=True)
class SafetensorsOptions:
    """How bytes are moved. The defaults are meant for local disks and file systems that look like one.

    Attributes:
      alias: map files into memory and let CPU arrays share their pages wherever a shard lies in the file as it does in
        memory, at a multiple of 64 bytes. Nothing is then read until it is used. While such an array lives, the file
        stays open, writing into it changes the array, and truncating it kills the process; renaming and deleting are
        safe.
      in_flight_bytes: host memory that may be held for bytes on their way to or from an accelerator, or as much as a
        process holds of one leaf, with those that are made of the same stored tensors. Arrays on CPU devices do not
        count, because their memory is read into and written from; nor do asynchronous saves, which copy all shards
        first.
      threads: reads or writes that are in flight at once; of writes no more than one for each file.
      alignment: the data of a file that is saved begins at a multiple of this many bytes, a multiple of 8. With 64, the
        file can be restored with `alias`; with 8, it is the same byte for byte as the reference writer makes it.
      fsync: a save ends when its bytes are on the disk, rather than when the system has them.
      dequantize: with a family, tensors that are quantised as `quantization_config` of `config.json` says are decoded
        while they are read. Without, the family has to know their codes and scales.
      max_gap_bytes: two runs of one shard are read as one where the gap between them is no longer than this: what a
        disk reads in the time that a request takes.

    Raises:
      SafetensorsError: a number is out of range.
    """

    alias: bool = False
    in_flight_bytes: int = 2 * 2**30
    threads: int = _default_threads()
    max_gap_bytes: int = 16 * 2**10
    alignment: int = 64
    fsync: bool = False
    dequantize: bool = True

    def __post_init__(self) -> None:
        for name, least in (("in_flight_bytes", 1), ("threads", 1), ("max_gap_bytes", 0), ("alignment", 8)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SafetensorsError(
                    f"SafetensorsOptions: {name} is {value!r}, must be an integer of at least {least}"
                )
        if self.alignment % 8:
            raise SafetensorsError(f"SafetensorsOptions: alignment is {self.alignment}, must be a multiple of 8")
