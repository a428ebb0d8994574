"""The checksums that a save has recorded beside the files of a checkpoint, and tensors that differ from them."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Mapping

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.errors import ChecksumError, MissingError
from orbax_safetensors.format.checksums import CHECKSUMS_NAME, FileChecksums, parse
from orbax_safetensors.format.header import MAX_HEADER_BYTES
from orbax_safetensors.format.names import some
from orbax_safetensors.geometry.crc import crc_of
from orbax_safetensors.storage.store import Store, find_small
from orbax_safetensors.transfer.sums import Sums

logger = logging.getLogger(__name__)

# A record names the tensors that headers name, with fewer facts of each.
_MAX_BYTES = MAX_HEADER_BYTES

Recorded = Mapping[str, FileChecksums]  # by the name of a file


class RestoreChecksums:
    """Of a restore: the tensors that this process reads whole, with the checksums of their save."""

    def __init__(self, checkpoint: Checkpoint, *, partial: bool) -> None:
        """Raise `ChecksumError` if there are no checksums of a file, or if a file is not the one that was saved.

        Raises `MissingError` if a file is missing that the save wrote, unless the restore is `partial`.
        """
        recorded = read_checksums(checkpoint.store, checkpoint.directory) or {}
        for missing in () if partial else missing_files(checkpoint, recorded):
            raise missing
        self.sums = Sums(with_gaps=False)
        self._checkpoint = checkpoint
        self._recorded: list[FileChecksums] = []
        for number, stored in enumerate(checkpoint.files):
            checksums = recorded.get(posixpath.basename(stored.path))
            if checksums is None:
                raise ChecksumError(
                    f"{stored.path}: no save has recorded its checksums, which "
                    "SafetensorsOptions(checksums=True) compares"
                )
            if (other := other_file(checkpoint, number, checksums)) is not None:
                raise other
            self._recorded.append(checksums)

    def check(self) -> None:
        """Raise `ChecksumError` with the names of all tensors that differ from what was saved."""
        changed, compared = [], 0
        for number, checksums in enumerate(self._recorded):
            faults, tensors = changed_tensors(self._checkpoint, number, checksums, self.sums)
            changed += faults
            compared += tensors
        if len(changed) == 1:
            raise changed[0]
        if changed:
            raise ChecksumError(f"{len(changed)} tensors differ from their checksums: {some(changed, separator='; ')}")
        logger.info(
            "%s: compared %d of %d tensors with the checksums of their save",
            self._checkpoint.path,
            compared,
            sum(len(stored.header.tensors) for stored in self._checkpoint.files),
        )


def read_checksums(store: Store, directory: str) -> Recorded | None:
    """Return the record beside the files in a directory; None if there is none.

    Raises `ChecksumError` if it is not one, and `StorageError` if it cannot be read.
    """
    path = posixpath.join(directory, CHECKSUMS_NAME)
    content = find_small(store, path, _MAX_BYTES)
    return None if content is None else parse(content, path=path)


def missing_files(checkpoint: Checkpoint, recorded: Recorded) -> list[MissingError]:
    """Return an error for each file that was recorded and is missing; none if the checkpoint is one file of several."""
    if checkpoint.is_file:
        return []
    return [
        MissingError(f"{posixpath.join(checkpoint.path, name)}: is missing, and the save wrote it")
        for name in sorted(recorded.keys() - checkpoint.fingerprints.keys())
    ]


def other_file(checkpoint: Checkpoint, number: int, recorded: FileChecksums) -> ChecksumError | None:
    """Return an error if a file has another size or another header than the recorded one."""
    stored = checkpoint.files[number]
    if stored.fingerprint == recorded.fingerprint and stored.header.tensors.keys() == recorded.tensors.keys():
        return None
    return ChecksumError(
        f"{stored.path}: is not the file that {CHECKSUMS_NAME} records: expected {dict(recorded.fingerprint)}, "
        f"found {dict(stored.fingerprint)}"
    )


def changed_tensors(
    checkpoint: Checkpoint, number: int, recorded: FileChecksums, sums: Sums
) -> tuple[list[ChecksumError], int]:
    """Return an error for each tensor of a file that `sums` have all of and that differs, and how many these have."""
    stored = checkpoint.files[number]
    remainders, whole = sums.of_tensors(number, stored.header)
    faults = []
    for (name, entry), part, is_whole in zip(
        stored.header.tensors.items(), remainders.tolist(), whole.tolist(), strict=True
    ):
        if is_whole and (found := crc_of(part, entry.nbytes)) != (expected := recorded.tensors[name]):
            faults.append(
                ChecksumError(
                    f"{stored.path}: tensor {name!r}: its bytes are not those that {CHECKSUMS_NAME} records: "
                    f"expected CRC-32 {expected:08x}, found {found:08x}"
                )
            )
    return faults, int(whole.sum())
