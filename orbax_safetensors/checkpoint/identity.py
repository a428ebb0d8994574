"""What tells a checkpoint from another one on another host, which may have its own copy of the files.

Paths and times of files differ between copies. Headers do not tell a model from what training made of it. The checksums
that a save has recorded do, and so does a server's name for the content of a file. Without these, few bytes are read
everywhere in a file.
"""

from __future__ import annotations

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.checksums import recorded_content
from orbax_safetensors.format.digest import digest_of

# Samples of a file: a page each, as a disk reads no less.
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def identity(checkpoint: Checkpoint) -> dict[str, str]:
    """Return digests by the name of what they are of. They are equal in processes that see the same checkpoint.

    Raises `StorageError` if a file cannot be read.
    """
    digests = {"headers": digest_of([sorted(file.fingerprint.items()) for file in checkpoint.files])}
    if not checkpoint.store.is_local:
        digests["versions"] = digest_of([file.stamp.version for file in checkpoint.files])
        return digests
    record = recorded_content(checkpoint)
    digests["recorded checksums"] = digest_of([record])
    if record is None:
        digests["sampled bytes"] = digest_of([_samples(checkpoint, number) for number in range(len(checkpoint.files))])
    return digests


def _samples(checkpoint: Checkpoint, number: int) -> bytes:
    header = checkpoint.files[number].header
    offsets = [header.data_start + header.data_bytes * sample // _SAMPLES for sample in range(_SAMPLES)]
    sampled = [bytearray(min(_SAMPLE_BYTES, header.file_bytes - offset)) for offset in offsets]
    file = checkpoint.open_file(number)
    try:
        file.read((offset, [memoryview(sample)]) for offset, sample in zip(offsets, sampled, strict=True))
    finally:
        file.close()
    return b"".join(sampled)
