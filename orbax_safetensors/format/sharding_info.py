"""PyTorch's sharded safetensors: several files hold pieces of a tensor under one name.

PyTorch's distributed checkpoints (`torch.distributed.checkpoint.HuggingFaceStorageWriter` with `save_distributed`)
have a file for each rank. Its metadata has the offsets in the whole tensors at which the file's pieces begin.
"""

import json
from collections.abc import Mapping

from orbax_safetensors.errors import HeaderError
from orbax_safetensors.format import strict_json
from orbax_safetensors.format.header import Header, shown
from orbax_safetensors.format.names import some

_KEY = "DCP_SHARDING_INFO"
_VERSION_KEY = "DCP_VERSION"
_VERSION = "1.0"
_OFFSETS = "saved_offsets"


def saved_offsets(header: Header, *, file: str) -> dict[str, tuple[int, ...]] | None:
    """Return where each tensor of a file begins in the whole tensor, in elements; None if the file has no pieces.

    Raises HeaderError if the metadata is of another version or does not fit the tensors.
    """
    text = header.metadata.get(_KEY)
    if text is None:
        return None
    version = header.metadata.get(_VERSION_KEY)
    if version != _VERSION:
        raise HeaderError(f"{file}: expected {_VERSION_KEY} {_VERSION!r} beside {_KEY}, found {shown(version)}")
    try:
        offsets = _read(text, header)
    except ValueError as error:
        raise HeaderError(f"{file}: {_KEY}: {error}") from error
    if missing := [name for name in header.tensors if name not in offsets]:
        raise HeaderError(f"{file}: {_KEY}: expected every tensor of the file, did not find {some(missing, shown)}")
    return offsets


def _read(text: str, header: Header) -> dict[str, tuple[int, ...]]:
    information = strict_json.parse(text.encode())
    if not isinstance(information, dict):
        raise ValueError(f"expected a JSON object, found {shown(information)}")
    offsets: dict[str, tuple[int, ...]] = {}
    for name in information.keys() & header.tensors:
        facts, rank = information[name], len(header.tensors[name].shape)
        start = facts.get(_OFFSETS) if isinstance(facts, dict) else None
        if (
            not isinstance(start, list)
            or len(start) != rank
            or not all(type(offset) is int and offset >= 0 for offset in start)
        ):
            raise ValueError(f"{shown(name)}: expected {rank} {_OFFSETS}, found {shown(facts)}")
        offsets[name] = tuple(start)
    return offsets


def sharding_info(offsets: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the metadata of a file whose pieces begin at `offsets` of the whole tensors, for `saved_offsets`."""
    information = {name: {_OFFSETS: list(start)} for name, start in offsets.items()}
    return {_VERSION_KEY: _VERSION, _KEY: json.dumps(information)}


def without_sharding_info(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of files of pieces as files of whole tensors have it."""
    return {key: text for key, text in metadata.items() if key not in (_KEY, _VERSION_KEY)}


def file_name(rank: int) -> str:
    """Return the name that PyTorch gives the file of a rank, counted from 0."""
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
