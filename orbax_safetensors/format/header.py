"""The header of a `.safetensors` file: bytes to facts, facts to bytes, and the checks of both.

Callers bring the bytes and the file's size: nothing here reads or writes files, or handles the tensors' data.

A file is a little-endian u64 `N`, `N` bytes of JSON, then the data. This module accepts the same headers as the
reference implementation, with two exceptions: a duplicate key is an error here, and so is a header that consists almost
entirely of brackets.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from orbax_safetensors.errors import HeaderError
from orbax_safetensors.format import strict_json
from orbax_safetensors.format.dtypes import DTYPES, DType
from orbax_safetensors.format.foreign import of_bytes

PREFIX_BYTES = 8
"""Size of `N`, in bytes."""

MAX_HEADER_BYTES = 100_000_000
"""Largest `N`, in bytes: the reference's limit, which makes it safe to read a header before it is checked."""

_U64_MAX = 2**64 - 1
_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_ENTRY_DEPTH = 2  # level of nesting of a tensor's entry
_MAX_DEPTH = 127  # levels of nesting that the reference's parser follows
_INTEGER = "(?:0|[1-9][0-9]{0,18})"
# A tensor, up to the next one, as the reference writes it. ASCII first, which takes half the time of the set of all
# characters. A match is empty if there is none, so that a search for all of them stops. `_type_of` checks the first
# half of each entry once per spelling; a model has few of them.
_USUAL_TENSOR = re.compile(
    r'"([ !#-\[\]-~]*+[^\"\\\x00-\x1f]*+)":(\{"dtype":"[A-Z0-9_]++","shape":\[[0-9,]{0,1400}+\]),'
    rf'"data_offsets":\[({_INTEGER}),({_INTEGER})\]\}}([,}}])|'
)
_USUAL_METADATA = f'{{"{_METADATA}":'
_MAX_SHOWN = 200  # characters of a file's text in a message: a hostile name can be 100 MB long


class TensorEntry(NamedTuple):
    """Where one tensor lies: `shape` in elements, `[begin, end)` in bytes from the start of the data section."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the stored tensor."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """The facts of a header. The constructor checks them, so that an invalid Header does not exist.

    tensors: name -> entry, in file order; the constructor takes any order.
    metadata: the free text of the file; empty if it has none.
    data_start: bytes before the data section, 8 + N.
    data_bytes: size of the data section.

    Raises HeaderError, without the file's name, which only `parse` knows.
    """

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    data_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        in_file_order = _validate(self.tensors, self.metadata, self.data_start)
        # Read-only copies: checked values stay as they were.
        object.__setattr__(self, "tensors", MappingProxyType({entry.name: entry for entry in in_file_order}))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        object.__setattr__(self, "data_bytes", in_file_order[-1].end if in_file_order else 0)

    @property
    def file_bytes(self) -> int:
        """Return the size of the whole file."""
        return self.data_start + self.data_bytes

    @classmethod
    def parse(cls, text: bytes, file_nbytes: int, *, file: str) -> "Header":
        """Return the header whose JSON is `text`, all `N` bytes of it, in a file of `file_nbytes` bytes.

        `file` is for messages only. Raises HeaderError if the header is invalid or does not fit the size of the file.
        """
        try:
            facts = _read_usual(text) or _read(text)
            header = cls(*facts, data_start=PREFIX_BYTES + len(text))
        except ValueError as error:  # HeaderError is a subclass
            raise HeaderError(f"{file}: {error}") from error
        if header.file_bytes != file_nbytes:
            raise HeaderError(
                f"{file}: expected {header.file_bytes} bytes ({header.data_start} up to the data, {header.data_bytes} "
                f"of data), found a file of {file_nbytes}"
            )
        return header

    @classmethod
    def layout(
        cls,
        tensors: Iterable[tuple[str, DType, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
        *,
        alignment: int = 64,
    ) -> "Header":
        """Return the header of a new file of `(name, dtype, shape)` tensors, in the reference writer's order.

        Wider element types come first, then names ascend; there are no gaps between tensors. The data section starts at
        a multiple of `alignment` bytes, itself a multiple of 8. An empty `metadata` is left out of the file; None
        means `{"format": "pt"}`, without which `transformers` refuses a file. Raises HeaderError.
        """
        if alignment < PREFIX_BYTES or alignment % PREFIX_BYTES:
            raise HeaderError(f"expected an alignment that is a positive multiple of 8 bytes, found {alignment}")
        if metadata is None:
            metadata = {"format": "pt"}
        entries: dict[str, TensorEntry] = {}
        begin = 0
        for name, dtype, shape in sorted(tensors, key=lambda tensor: (-tensor[1].rank, tensor[0])):
            if name in entries:
                raise HeaderError(f"tensor {shown(name)}: expected each name once, found it twice")
            # Rounded down if packed elements leave a part of a byte: the constructor rejects those.
            end = begin + math.prod(shape) * dtype.bits // 8
            entries[name] = TensorEntry(name, dtype, shape, begin, end)
            begin = end
        # Checked before it is measured: JSON cannot hold every value.
        unmeasured = cls(entries, metadata, data_start=PREFIX_BYTES)
        unpadded = PREFIX_BYTES + len(_json(unmeasured))
        return replace(unmeasured, data_start=-(-unpadded // alignment) * alignment)

    @cached_property
    def encoded(self) -> bytes:
        """The file's first `data_start` bytes: `N`, JSON, spaces.

        Metadata is sorted by key, so that equal headers make equal bytes. Raises HeaderError if the JSON is longer than
        `data_start` allows, which never happens to a header from `layout`.
        """
        text = _json(self)
        length = self.data_start - PREFIX_BYTES
        if len(text) > length:
            raise HeaderError(f"expected JSON of at most {length} bytes before the data, found {len(text)}")
        return length.to_bytes(PREFIX_BYTES, "little") + text.ljust(length)


def header_length(prefix: bytes, file_nbytes: int, *, file: str) -> int:
    """Return `N`, from the first 8 bytes of a file of `file_nbytes` bytes (all of them, if it has fewer).

    Raises HeaderError if there are not 8, or if `N` is over the limit or reaches beyond the file: so many bytes are
    safe to allocate.
    """
    not_safetensors = f"{file}: is not a safetensors file"  # others begin with text or a mark, which makes a huge `N`
    if len(prefix) < PREFIX_BYTES or file_nbytes < PREFIX_BYTES:
        found = min(len(prefix), file_nbytes)
        raise HeaderError(f"{not_safetensors}: expected at least {PREFIX_BYTES} bytes, found {found}")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > max(MAX_HEADER_BYTES, file_nbytes - PREFIX_BYTES):
        kind = of_bytes(prefix, file)
        raise HeaderError(
            f"{not_safetensors}: expected the length of a header in its first bytes, found {prefix[:PREFIX_BYTES]!r}"
            f"{f'; it is {kind}' if kind else ''}"
        )
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"{file}: expected a header of at most {MAX_HEADER_BYTES} bytes, found {length}")
    if PREFIX_BYTES + length > file_nbytes:
        raise HeaderError(
            f"{file}: expected {PREFIX_BYTES + length} bytes up to the data, found a file of {file_nbytes}"
        )
    return length


def fingerprint(nbytes: int, header: bytes | bytearray) -> dict[str, Any]:
    """Return what tells a file apart: its size, and a digest of its header without the eight bytes before it."""
    return {"nbytes": nbytes, "header_sha256": hashlib.sha256(header).hexdigest()}


def shown(value: object) -> str:
    """Return `value` for a message, cut if it is long."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _read(text: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors and the metadata of the JSON; `_validate` checks their numbers and texts."""
    document = strict_json.parse(text)
    if not isinstance(document, dict):
        raise HeaderError(f"expected a JSON object, found {shown(document)}")
    metadata = document.pop(_METADATA, None)  # null stands for no metadata
    tensors = {name: _entry(name, fields) for name, fields in document.items()}
    return tensors, {} if metadata is None else metadata


def _read_usual(text: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]] | None:
    """Return what `_read` returns in half of the time of `json`; None unless it is valid, in the usual spelling."""
    strict_json.check_density(text)
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    try:
        document = text.decode()
        at = 1
        if document.startswith(_USUAL_METADATA):
            metadata, at = strict_json.decoder.raw_decode(document, len(_USUAL_METADATA))
            if metadata is None or document[at : at + 1] != ",":
                return None
            at += 1
    except (ValueError, RecursionError):
        return None
    if not document.startswith("{"):
        return None
    for match in _USUAL_TENSOR.finditer(document, at):
        name, type_text, begin, end, mark = match.groups()
        if name is None or name in tensors or name == _METADATA or (kind := _type_of(type_text)) is None:
            break
        tensors[name] = TensorEntry(name, *kind, int(begin), int(end))
        if mark == "}":
            return None if document[match.end() :].strip(" ") else (tensors, metadata)
    return None


@lru_cache(maxsize=2**10)
def _type_of(text: str) -> tuple[DType, tuple[int, ...]] | None:
    """Return the dtype and the shape at the beginning of a tensor's entry; None if they are wrong."""
    try:
        fields = strict_json.decoder.decode(f"{text}}}")
    except ValueError:
        return None
    dtype = DTYPES.get(fields["dtype"])
    return None if dtype is None else (dtype, tuple(fields["shape"]))


def _entry(name: str, fields: object) -> TensorEntry:
    """Return a tensor, in any spelling that the reference accepts."""
    found: dict[str, object] = {}
    if isinstance(fields, dict):
        found = fields
    elif isinstance(fields, list) and len(fields) == len(_FIELDS):  # the values alone
        found = dict(zip(_FIELDS, fields, strict=True))
    dtype, shape, offsets = map(found.get, _FIELDS)
    if isinstance(dtype, dict) and list(dtype.values()) == [None]:  # {"F32": null} for "F32"
        (dtype,) = dtype
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise HeaderError(
            f"tensor {shown(name)}: expected an object with dtype (text), shape (a list) and data_offsets (two "
            f"numbers), found {shown(fields)}"
        )
    if dtype not in DTYPES:
        raise HeaderError(f"tensor {shown(name)}: expected a dtype of {', '.join(DTYPES)}, found {shown(dtype)}")
    try:
        _check_ignored({field: value for field, value in found.items() if field not in _FIELDS}, _ENTRY_DEPTH)
    except ValueError as error:
        raise HeaderError(f"tensor {shown(name)}: {error}") from error
    return TensorEntry(name, DTYPES[dtype], tuple(shape), *offsets)


def _check_ignored(value: object, depth: int) -> None:
    """Raise ValueError for what the reference's parser refuses even in a field that it ignores.

    `depth` is the level of nesting of the value, if it is an object or a list.
    """
    if isinstance(value, str):
        strict_json.check_encodable(value)
    elif isinstance(value, dict | list):
        if depth > _MAX_DEPTH:
            raise ValueError(f"expected at most {_MAX_DEPTH} levels of nesting, found more")
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_ignored(item, depth + 1)


def _validate(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], data_start: int) -> list[TensorEntry]:
    """Return the entries in file order. Raises HeaderError if no valid file has this header."""
    if not PREFIX_BYTES <= data_start <= PREFIX_BYTES + MAX_HEADER_BYTES:
        raise HeaderError(f"expected a header of 0 to {MAX_HEADER_BYTES} bytes, found {data_start - PREFIX_BYTES}")
    _validate_metadata(metadata)
    if _METADATA in tensors:
        raise HeaderError(f"tensor {_METADATA!r}: expected any other name: this key holds the metadata")
    for name, entry in tensors.items():
        if entry.name != name:
            raise HeaderError(f"tensor {shown(name)}: expected an entry of that name, found {shown(entry.name)}")
        if not name.isascii():
            _check_encodable(name, f"tensor {shown(name)}")
        begin, end = entry.begin, entry.end
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= _U64_MAX:
            raise HeaderError(
                f"tensor {shown(name)}: expected ascending data_offsets that are u64 integers, "
                f"found {shown([begin, end])}"
            )
        # Each product in turn: the reference counts in u64, and an overflow stands even if a later dimension is 0.
        count = 1
        for size in entry.shape:
            if type(size) is not int or not 0 <= size <= _U64_MAX:
                raise HeaderError(
                    f"tensor {shown(name)}: expected sizes that are u64 integers, found shape {shown(entry.shape)}"
                )
            count *= size
            if count > _U64_MAX:
                raise HeaderError(
                    f"tensor {shown(name)}: expected fewer than 2**64 elements, found shape {shown(entry.shape)}"
                )
        bits = count * entry.dtype.bits
        if bits > _U64_MAX or bits & 7 or bits >> 3 != end - begin:
            raise HeaderError(_size_fault(entry, bits))
    # By begin, then end. Two stable sorts by integers make no tuples, which the garbage collector would walk.
    in_file_order = sorted(sorted(tensors.values(), key=attrgetter("end")), key=attrgetter("begin"))
    position = 0
    for entry in in_file_order:
        if entry.begin != position:
            raise HeaderError(
                f"tensor {shown(entry.name)}: expected it to begin at byte {position}, where the tensor before it "
                f"ends, found {entry.begin}"
            )
        position = entry.end
    return in_file_order


def _check_encodable(text: str, where: str) -> None:
    try:
        strict_json.check_encodable(text)
    except ValueError as error:
        raise HeaderError(f"{where}: {error}") from error


def _size_fault(entry: TensorEntry, bits: int) -> str:
    what = f"tensor {shown(entry.name)}: {entry.dtype.name} of shape {shown(entry.shape)}: expected"
    if bits > _U64_MAX:
        return f"{what} fewer than 2**64 bits, found {bits}"
    if bits % 8:
        return f"{what} a whole number of bytes, found {bits} bits"
    return f"{what} {bits // 8} bytes, found {entry.nbytes}, data_offsets {[entry.begin, entry.end]}"


def _validate_metadata(metadata: Mapping[str, str]) -> None:
    if not isinstance(metadata, Mapping):
        raise HeaderError(f"{_METADATA}: expected an object, found {shown(metadata)}")
    for key, value in metadata.items():
        if type(key) is not str or type(value) is not str:
            raise HeaderError(f"{_METADATA}: expected text, found {shown(value)} under {shown(key)}")
        _check_encodable(key + value, _METADATA)


def _json(header: Header) -> bytes:
    document: dict[str, object] = {_METADATA: dict(sorted(header.metadata.items()))} if header.metadata else {}
    for entry in header.tensors.values():
        document[entry.name] = {
            "dtype": entry.dtype.name,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
