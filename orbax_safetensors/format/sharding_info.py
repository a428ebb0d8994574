"""PyTorch's sharded safetensors: where the pieces of a tensor belong that several files hold under one name.

PyTorch's distributed checkpoints (`torch.distributed.checkpoint.HuggingFaceStorageWriter` with `save_distributed`)
write a file for each rank, and say in its metadata at which offsets of the whole tensors its own begin.
"""

import json
from collections.abc import Mapping

from orbax_safetensors.errors import HeaderError
from orbax_safetensors.format.header import Header, load_json_object, shown

_KEY = "DCP_SHARDING_INFO"
_VERSION_KEY = "DCP_VERSION"
_VERSION = "1.0"


def saved_offsets(header: Header, *, file: str) -> dict[str, tuple[int, ...]] | None:
    """For each tensor of a file, in elements, where it begins in the whole tensor; None where the file has no pieces.

    Raises HeaderError where the metadata is of another version or does not fit the tensors.
    """
    text = header.metadata.get(_KEY)
    if text is None:
        return None
    version = header.metadata.get(_VERSION_KEY)
    if version != _VERSION:
        raise HeaderError(f"{file}: expected {_VERSION_KEY} {_VERSION!r} beside {_KEY}, found {shown(version)}")
    try:
        information = load_json_object(text.encode())
    except ValueError as error:
        raise HeaderError(f"{file}: {_KEY}: {error}") from error
    offsets = {}
    for name, entry in header.tensors.items():
        found = information.get(name)
        start = found.get("saved_offsets") if isinstance(found, dict) else None
        if not _is_position(start, len(entry.shape)):
            raise HeaderError(
                f"{file}: {name!r}: expected {len(entry.shape)} saved_offsets in {_KEY}, found {shown(found)}"
            )
        offsets[name] = tuple(start or ())
    return offsets


def _is_position(start: object, rank: int) -> bool:
    return isinstance(start, list) and len(start) == rank and all(type(at) is int and at >= 0 for at in start)


def sharding_info(offsets: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The metadata of a file of pieces, which begin at `offsets` of the whole tensors: what `saved_offsets` reads."""
    information = {name: {"saved_offsets": list(start)} for name, start in offsets.items()}
    return {_VERSION_KEY: _VERSION, _KEY: json.dumps(information)}


def without_sharding_info(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of files of pieces, for files of whole tensors."""
    return {key: text for key, text in metadata.items() if key not in (_KEY, _VERSION_KEY)}


def file_name(rank: int) -> str:
    """The name that PyTorch gives the file of a rank, counted from 0."""
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
