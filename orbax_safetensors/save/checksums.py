"""The checksums that a save records, put together from what each process has written.

Processes that write into the same files each have the remainders of their own bytes, which add up. Where a file has one
writer, that process has the checksums of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_safetensors.format.checksums import FileChecksums, encode, parse
from orbax_safetensors.format.header import PREFIX_BYTES
from orbax_safetensors.geometry.crc import crc_of
from orbax_safetensors.orbax_store.index_note import fingerprint
from orbax_safetensors.save.prepare import Save
from orbax_safetensors.transfer.sums import Sums


def part_of_process(save: Save, sums: Sums, *, shared: bool) -> str:
    """Return what this process contributes to `of_all_processes`.

    With `shared`, all processes write into the same files.
    """
    remainders = [sums.of_tensors(number, header)[0] for number, (_, header) in enumerate(save.layout.files)]
    if shared:
        return np.concatenate(remainders).tobytes().hex()
    return encode(_files(save, remainders)).decode()


def of_all_processes(save: Save, parts: Sequence[str], *, shared: bool) -> dict[str, FileChecksums]:
    """Return the checksums of all files by name, given the `part_of_process` of all processes."""
    if not shared:
        return {name: file for part in parts for name, file in parse(part.encode(), path="a part").items()}
    total = np.bitwise_xor.reduce([np.frombuffer(bytes.fromhex(part), np.uint32) for part in parts])
    ends = np.cumsum([len(header.tensors) for _, header in save.layout.files])
    return _files(save, np.split(total, ends[:-1]))


def _files(save: Save, remainders: Sequence[np.ndarray]) -> dict[str, FileChecksums]:
    return {
        name: FileChecksums(
            fingerprint(header.file_bytes, header.encoded[PREFIX_BYTES:]),
            {
                tensor: crc_of(part, entry.nbytes)
                for (tensor, entry), part in zip(header.tensors.items(), of_file.tolist(), strict=True)
            },
        )
        for (name, header), of_file in zip(save.layout.files, remainders, strict=True)
    }
