"""`safetensors.checksums.json`: the checksum of every tensor that a save has written, which no header can hold.

The record has a digest of itself, so that damage to it is not taken for damage to a tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orbax_safetensors.errors import ChecksumError
from orbax_safetensors.format import strict_json

CHECKSUMS_NAME = "safetensors.checksums.json"

_ALGORITHM = "crc32"
_MAX_SHOWN = 200  # characters of both facts of a file, which messages show
_CRC = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class FileChecksums:
    """What a file was: its size and a digest of its header, and the CRC-32 of the bytes of each tensor in it."""

    fingerprint: Mapping[str, Any]
    tensors: Mapping[str, int]


def encode(files: Mapping[str, FileChecksums]) -> bytes:
    """Return the content of `CHECKSUMS_NAME` for files by name."""
    facts = {
        name: {**file.fingerprint, "tensors": {tensor: f"{crc:08x}" for tensor, crc in file.tensors.items()}}
        for name, file in files.items()
    }
    document = {"algorithm": _ALGORITHM, "files_sha256": _digest(facts), "files": facts}
    return f"{json.dumps(document, indent=1)}\n".encode()


def parse(content: bytes, *, path: str) -> dict[str, FileChecksums]:
    """Return checksums by the name of their file; `ChecksumError`, which names `path`, if that is not what it has."""
    try:
        document = strict_json.loads(content)
        if (algorithm := document["algorithm"]) != _ALGORITHM:
            raise ValueError(f"expected the algorithm {_ALGORITHM}, found {algorithm!r:.80}")
        # Earlier versions did not write it.
        if "files_sha256" in document and document["files_sha256"] != _digest(document["files"]):
            raise ValueError("the record was changed: its files_sha256 is not that of its files")
        return {name: _of_file(dict(facts)) for name, facts in document["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChecksumError(f"{path}: does not have the checksums of a save: {error!r:.200}") from error


def _digest(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _of_file(facts: dict[str, Any]) -> FileChecksums:
    tensors = facts.pop("tensors")
    if not (facts.keys() == {"nbytes", "header_sha256"} and len(str(facts)) < _MAX_SHOWN):
        raise ValueError("expected the size and the digest of the header of each file")
    if not all(_CRC.fullmatch(text) for text in tensors.values()):
        raise ValueError("expected 8 hexadecimal digits for each tensor")
    return FileChecksums(facts, {name: int(text, 16) for name, text in tensors.items()})
