"""The header of a `.safetensors` file: bytes to facts, facts to bytes, and every check of either.

Not for reading or writing files: callers bring the bytes and the file's size. Not for the tensors' data.

A file is a little-endian u64 `N`, `N` bytes of JSON, then the data. What is accepted is what the reference
implementation accepts, with one exception: a duplicate key is an error here.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from orbax_safetensors.errors import HeaderError
from orbax_safetensors.format.dtypes import DTYPES, DType

PREFIX_BYTES = 8
"""Size of `N`, in bytes."""

MAX_HEADER_BYTES = 100_000_000
"""Largest `N`, in bytes: the reference's own limit, so that a header can be read before it is trusted."""

_U64_MAX = 2**64 - 1
_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_MAX_DEPTH = 127  # levels of nesting that the reference's JSON parser follows
_MAX_SHOWN = 200  # characters of a file's own text in a message: a hostile name can be 100 MB long


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `shape` in elements, `[begin, end)` in bytes from the start of the data section."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """All that a header says. Building one checks it, so that an invalid Header does not exist.

    tensors: name -> entry, in file order, in whatever order they are given.
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
        # Read-only copies: what has been checked stays as it was.
        object.__setattr__(self, "tensors", MappingProxyType({entry.name: entry for entry in in_file_order}))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        object.__setattr__(self, "data_bytes", in_file_order[-1].end if in_file_order else 0)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + self.data_bytes

    @classmethod
    def parse(cls, text: bytes, file_nbytes: int, *, file: str) -> "Header":
        """The header whose JSON is `text`, all `N` bytes of it, in a file of `file_nbytes` bytes.

        `file` is for messages only. Raises HeaderError for everything that is wrong with the header or with its fit
        to the size of the file.
        """
        try:
            document = load_json_object(text, hook=_entry_or_object)
            metadata = document.pop(_METADATA, None)
            header = cls(
                # Let go of each value as it is used: fewer live objects for the garbage collector to walk.
                tensors={name: _entry(name, document.pop(name)) for name in list(document)},
                metadata={} if metadata is None else metadata,
                data_start=PREFIX_BYTES + len(text),
            )
        except ValueError as error:  # a HeaderError is one, too
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
        """The header of a new file of `(name, dtype, shape)` tensors, in the order in which the reference writes them.

        Wider element types come first, then names ascend; nothing is left between tensors. The data section starts at
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
            # Rounded down where packed elements leave a part of a byte: building the header rejects those.
            end = begin + math.prod(shape) * dtype.bits // 8
            entries[name] = TensorEntry(name, dtype, shape, begin, end)
            begin = end
        # Checked before it is measured: JSON cannot be made of everything.
        unmeasured = cls(entries, metadata, data_start=PREFIX_BYTES)
        unpadded = PREFIX_BYTES + len(_json(unmeasured))
        return replace(unmeasured, data_start=-(-unpadded // alignment) * alignment)

    def encode(self) -> bytes:
        """The file's first `data_start` bytes: `N`, JSON, spaces.

        The bytes depend on nothing but the header: metadata is sorted by key. Raises HeaderError if the JSON is longer
        than `data_start` allows, which a header from `layout` never is.
        """
        text = _json(self)
        length = self.data_start - PREFIX_BYTES
        if len(text) > length:
            raise HeaderError(f"expected JSON of at most {length} bytes before the data, found {len(text)}")
        return length.to_bytes(PREFIX_BYTES, "little") + text.ljust(length)


def header_length(prefix: bytes, file_nbytes: int, *, file: str) -> int:
    """`N`, from the first 8 bytes of a file of `file_nbytes` bytes (all of them, if it has fewer).

    Raises HeaderError if there are not 8, or if `N` is over the limit or reaches beyond the file: what it returns is
    safe to allocate.
    """
    no_file_of_ours = f"{file}: is no safetensors file"  # what begins with text, as most others do, has a huge `N`
    if len(prefix) < PREFIX_BYTES or file_nbytes < PREFIX_BYTES:
        found = min(len(prefix), file_nbytes)
        raise HeaderError(f"{no_file_of_ours}: expected at least {PREFIX_BYTES} bytes, found {found}")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"{no_file_of_ours}: expected a header of at most {MAX_HEADER_BYTES} bytes, found {length}")
    if PREFIX_BYTES + length > file_nbytes:
        raise HeaderError(
            f"{file}: expected {PREFIX_BYTES + length} bytes up to the data, found a file of {file_nbytes}"
        )
    return length


def object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values. Raises ValueError if a key is there twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} twice in one object")
            seen.add(key)
    return result


def load_json_object(
    text: bytes, *, hook: Callable[[list[tuple[str, Any]]], Any] = object_of_unique_keys
) -> dict[str, Any]:
    """The JSON object in `text`, read as strictly as the reference reads it; `hook` sees to duplicate keys.

    Integers of up to 20 digits are int; longer ones and `-0` are float, as are numbers with a point or an exponent,
    all finite. Strings may still hold lone surrogates. Raises ValueError, and nothing else of `json`'s or `codecs`'.
    """
    try:
        document = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=hook,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object in UTF-8, found: {error}") from error
    if type(document) is not dict:
        raise ValueError(f"expected a JSON object in UTF-8, found {shown(document)}")
    return document


def shown(value: object) -> str:
    """`value` for a message, cut if it is long."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _integer(literal: str) -> int | float:
    # 20 digits hold every u64. To the reference all longer integers are floats, and so is -0.
    return _finite(literal) if len(literal) > 20 or literal == "-0" else int(literal)


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"a number out of the range of a double: {literal[:_MAX_SHOWN]}")
    return value


def _refuse_constant(literal: str) -> float:
    raise ValueError(literal)


def _entry_or_object(pairs: list[tuple[str, Any]]) -> tuple[Any, ...] | dict[str, Any]:
    """What JSON spells as a tensor usually is, as `(dtype, shape, data_offsets)` of `(str, tuple, pair)`, else a dict.

    A header has up to 10**5 of these. As dicts of lists they would cost more in garbage collection than in parsing.
    """
    fields = object_of_unique_keys(pairs)
    if len(fields) == len(_FIELDS) and "data_offsets" in fields:
        return _usual_fields(fields) or fields
    return fields


def _usual_fields(fields: dict[str, Any]) -> tuple[str, tuple[Any, ...], tuple[Any, Any]] | None:
    dtype, shape, offsets = map(fields.get, _FIELDS)
    if type(dtype) is str and type(shape) is list and type(offsets) is list and len(offsets) == 2:
        return dtype, tuple(shape), (offsets[0], offsets[1])
    return None


def _entry(name: str, fields: Any) -> TensorEntry:
    """One tensor as JSON spells it; the numbers are left to `_validate`."""
    dtype, shape, (begin, end) = fields if type(fields) is tuple else _unusual_fields(name, fields)
    if dtype not in DTYPES:
        raise HeaderError(f"tensor {shown(name)}: expected a dtype of {', '.join(DTYPES)}, found {shown(dtype)}")
    return TensorEntry(name, DTYPES[dtype], shape, begin, end)


def _unusual_fields(name: str, fields: Any) -> tuple[str, tuple[Any, ...], tuple[Any, Any]]:
    """The fields of an entry that is spelled in a way that no writer uses but the reference takes, if it is one."""
    if type(fields) is list and len(fields) == len(_FIELDS):
        fields = dict(zip(_FIELDS, fields, strict=True))  # the values alone, in order
    if type(fields) is dict:
        dtype = fields.get("dtype")
        if type(dtype) is dict and list(dtype.values()) == [None]:
            fields = {**fields, "dtype": next(iter(dtype))}  # {"F32": null} for "F32"
        usual = _usual_fields(fields)
        if usual is not None:
            for key in fields.keys() - set(_FIELDS):
                _check_ignored(name, {key: fields[key]}, depth=2)
            return usual
    raise HeaderError(
        f"tensor {shown(name)}: expected an object with dtype (text), shape (a list) and data_offsets (two numbers), "
        f"found {shown(fields)}"
    )


def _check_ignored(name: str, value: Any, depth: int) -> None:
    """An unknown field may hold whatever the reference's parser can read. `value` is at `depth` in the header."""
    if type(value) is str:
        _check_encodable(value, f"tensor {shown(name)}: ")
    elif type(value) in (dict, list, tuple):
        if depth > _MAX_DEPTH:
            raise HeaderError(f"tensor {shown(name)}: expected at most {_MAX_DEPTH} levels of nesting, found more")
        for item in value:
            _check_ignored(name, item, depth + 1)
        if type(value) is dict:
            for item in value.values():
                _check_ignored(name, item, depth + 1)


def _check_encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        raise HeaderError(f"{where}expected text that UTF-8 can hold, found a lone surrogate {surrogate!r}") from error


def _validate(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], data_start: int) -> list[TensorEntry]:
    """The entries in file order, if there is a valid file with this header; HeaderError if not."""
    if not PREFIX_BYTES <= data_start <= PREFIX_BYTES + MAX_HEADER_BYTES:
        raise HeaderError(f"expected a header of 0 to {MAX_HEADER_BYTES} bytes, found {data_start - PREFIX_BYTES}")
    _validate_metadata(metadata)
    if _METADATA in tensors:
        raise HeaderError(f"tensor {_METADATA!r}: expected any other name: this key holds the metadata")
    for name, entry in tensors.items():
        if entry.name != name:
            raise HeaderError(f"tensor {shown(name)}: expected an entry of that name, found {shown(entry.name)}")
        if not name.isascii():
            _check_encodable(name, f"tensor {shown(name)}: ")
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
    # By begin, then end. Two stable sorts by integers need no tuples, which the garbage collector would walk.
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
        _check_encodable(key + value, f"{_METADATA}: ")


def _json(header: Header) -> bytes:
    document: dict[str, object] = {_METADATA: dict(sorted(header.metadata.items()))} if header.metadata else {}
    for entry in header.tensors.values():
        document[entry.name] = {
            "dtype": entry.dtype.name,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
