"""`write_references`: an OCDBT database whose values are ranges of files that exist already.

TensorStore reads such a database, but writes only values that pass through it. So this file writes the format, and
TensorStore reads it. As TensorStore documents it, integers are unsigned LEB128 unless another form is named:

- *File*: magic number (4 bytes, big-endian), length of the file (8 bytes, little-endian), version 0, compression 0
  (none), a body, CRC-32C of all before it (4 bytes, little-endian). A node is framed alike, and several nodes lie one
  after the other in one file.
- *Manifest*, `manifest.ocdbt`: a configuration, a file table, and the versions of the database, one here,
  with the place and the statistics of its root node.
- *Node*: its height (one byte, 0 of a leaf), a file table, the number of entries, and then column after column: of the
  keys the lengths of the prefix that each shares with the one before (except of the first), those of the rest, and the
  rests. A leaf goes on with the lengths of the values, their kinds (one byte, 0 inline and 1 a range of a file), the
  files and offsets of ranges, and the inline values. An inner node has, between lengths and rests of the keys, the
  length of the prefix that a child leaves out of its keys (none here), and after them file, offset and length of each
  child and its three statistics: keys, bytes of nodes, bytes of ranges.
- *File table*: the number of files, the lengths of the prefix that each path shares with the one before (except of the
  first), of the rest and of the part that is a base directory (none here), and the rests. Paths are relative to the
  directory of the database, and may be of any file below it.

Keys are sorted as bytes.
"""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from orbax_safetensors.errors import storage_errors
from orbax_safetensors.orbax_store.directories import kvstore
from orbax_safetensors.orbax_store.operations import results

_T = TypeVar("_T")

MANIFEST = "manifest.ocdbt"
# Where TensorStore puts the files of nodes and values that it writes.
DATA_DIRECTORY = "d"

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_INLINE, _RANGE = 0, 1
# The configuration for later writers: Orbax adds leaves to a database only if it has this one.
_MAX_INLINE_BYTES = 1024
_MAX_NODE_BYTES = 100_000_000
_ZSTD = 1
_VERSION_ARITY_LOG2 = 4
# Reading one array of a large database reads and decodes a leaf or two: a few thousand entries take milliseconds.
_NODE_BYTES = 2**18
_ENTRY_BYTES = 32  # about what an entry has besides its key and an inline value


class DataReference(NamedTuple):
    """Bytes `[offset, offset + length)` of a file, whose path is relative to the database's directory."""

    file: str
    offset: int
    length: int


Entry = tuple[bytes, bytes | DataReference]


class _Node(NamedTuple):
    """A node that has been encoded: its first key, its height, where it lies in the data file, and its statistics."""

    key: bytes
    height: int
    offset: int
    nbytes: int
    num_keys: int
    tree_bytes: int
    range_bytes: int


def write_references(entries: Iterable[Entry], write: Callable[[str, bytes], None]) -> int:
    """Write a database of `entries`, whose keys differ, and return the bytes of its files. No entries make no files.

    Calls `write` with the path of a file, relative to the database's directory, and its content: first with the nodes,
    and last with the manifest, which makes them a database.
    """
    entries = sorted(entries)
    if not entries:
        return 0
    data_file = f"{DATA_DIRECTORY}/{secrets.token_hex(16)}"
    content = bytearray()

    def add(key: bytes, body: bytes, height: int, num_keys: int, tree_bytes: int, range_bytes: int) -> _Node:
        node = _framed(_NODE_MAGIC, bytes([height]) + body)
        content.extend(node)
        return _Node(key, height, len(content) - len(node), len(node), num_keys, tree_bytes + len(node), range_bytes)

    nodes = []
    for leaf in _parts(entries, lambda entry: len(entry[0]) + _inline_bytes(entry[1]) + _ENTRY_BYTES):
        ranges = [value.length for _, value in leaf if isinstance(value, DataReference)]
        nodes.append(add(leaf[0][0], _leaf(leaf), 0, len(leaf), 0, sum(ranges)))
    while len(nodes) > 1:
        nodes = [
            add(
                children[0].key,
                _inner(children, data_file),
                children[0].height + 1,
                sum(child.num_keys for child in children),
                sum(child.tree_bytes for child in children),
                sum(child.range_bytes for child in children),
            )
            for children in _parts(nodes, lambda node: len(node.key) + _ENTRY_BYTES)
        ]
    write(data_file, bytes(content))
    manifest = _manifest(nodes[0], data_file)
    write(MANIFEST, manifest)
    return len(content) + len(manifest)


def merge(databases: Sequence[str], root: str) -> None:
    """Add the entries of databases in directories below `root` to the database in `root`, at once; no value is moved.

    Without one there, begin a database with the configuration that Orbax gives it.
    """
    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
    config = {
        "max_inline_value_bytes": _MAX_INLINE_BYTES,
        "max_decoded_node_bytes": _MAX_NODE_BYTES,
        "manifest_kind": "single",
    }
    with storage_errors(root):
        transaction = ts.Transaction(atomic=True)
        whole = kvstore(root, context, ocdbt=True, config=config, assume_config=True).with_transaction(transaction)
        copying = (
            (database, kvstore(database, context, ocdbt=True).experimental_copy_range_to(whole))
            for database in databases
        )
        results(copying, root)
        transaction.commit_async()
        results([(MANIFEST, transaction.future)], root)


def _inline_bytes(value: bytes | DataReference) -> int:
    return 0 if isinstance(value, DataReference) else len(value)


def _parts(items: Sequence[_T], size: Callable[[_T], int]) -> list[Sequence[_T]]:
    """Return `items` in runs of about `_NODE_BYTES`, and of two items at least, so that runs are fewer than items."""
    ends = list(accumulate(map(size, items)))
    parts, begin = [], 0
    while begin < len(items):
        before = ends[begin - 1] if begin else 0
        end = max(int(np.searchsorted(ends, before + _NODE_BYTES, side="right")), begin + 2)
        parts.append(items[begin:end])
        begin = end
    return parts


def _leaf(entries: Sequence[Entry]) -> bytes:
    ranges = [value for _, value in entries if isinstance(value, DataReference)]
    numbers = {file: number for number, file in enumerate(sorted({value.file for value in ranges}))}
    return b"".join(
        (
            _file_table(list(numbers)),
            _integers([len(entries)]),
            *_prefixed([key for key, _ in entries]),
            _integers([value.length if isinstance(value, DataReference) else len(value) for _, value in entries]),
            bytes(_RANGE if isinstance(value, DataReference) else _INLINE for _, value in entries),
            _integers([numbers[value.file] for value in ranges]),
            _integers([value.offset for value in ranges]),
            *(value for _, value in entries if not isinstance(value, DataReference)),
        )
    )


def _inner(children: Sequence[_Node], data_file: str) -> bytes:
    lengths, rests = _prefixed([child.key for child in children])
    return b"".join(
        (
            _file_table([data_file]),
            _integers([len(children)]),
            lengths,
            _integers([0] * len(children)),
            rests,
            _integers([0] * len(children)),
            _integers([child.offset for child in children]),
            _integers([child.nbytes for child in children]),
            _integers([child.num_keys for child in children]),
            _integers([child.tree_bytes for child in children]),
            _integers([child.range_bytes for child in children]),
        )
    )


def _manifest(root: _Node, data_file: str) -> bytes:
    body = b"".join(
        (
            secrets.token_bytes(16),
            _integers([0, _MAX_INLINE_BYTES, _MAX_NODE_BYTES]),
            bytes([_VERSION_ARITY_LOG2]),
            _integers([_ZSTD]),
            struct.pack("<i", 0),  # its default level
            _file_table([data_file]),
            _integers([1, 1]),  # one version, the first
            bytes([root.height]),
            _integers([0, root.offset, root.nbytes, root.num_keys, root.tree_bytes, root.range_bytes]),
            struct.pack("<Q", time.time_ns()),
            _integers([0]),
        )
    )
    return _framed(_MANIFEST_MAGIC, body)


def _framed(magic: int, body: bytes) -> bytes:
    head = _integers([0, 0])
    content = struct.pack(">I", magic) + struct.pack("<Q", 12 + len(head) + len(body) + 4) + head + body
    return content + _crc32c(content)


def _file_table(files: Sequence[str]) -> bytes:
    lengths, rests = _prefixed([os.fsencode(file) for file in files])
    return b"".join((_integers([len(files)]), lengths, _integers([0] * len(files)), rests))


def _prefixed(keys: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return keys without the prefix that each shares with the one before: the columns of lengths, and of the rests."""
    lengths = np.array([len(key) for key in keys], np.int64)
    if not len(lengths):
        return b"", b""
    width = int(lengths.max()) + 1
    padded = np.frombuffer(b"".join(key.ljust(width, b"\0") for key in keys), np.uint8).reshape(-1, width)
    differ = padded[1:] != padded[:-1]
    differ[:, -1] = True
    # Beyond the shorter of two keys is padding, which may equal a byte of the other.
    shared = np.minimum(differ.argmax(axis=1), np.minimum(lengths[1:], lengths[:-1]))
    shared = np.concatenate([[0], shared])
    rests = b"".join(key[cut:] for key, cut in zip(keys, shared.tolist(), strict=True))
    return _integers(shared[1:]) + _integers(lengths - shared), rests


def _integers(values: Sequence[int] | np.ndarray) -> bytes:
    """Encode unsigned LEB128: seven bits to a byte, lowest first, and the high bit set except in the last byte."""
    shifts = np.arange(0, 64, 7, dtype=np.uint64)
    parts = np.asarray(values, np.uint64)[:, None] >> shifts
    goes_on = np.zeros(parts.shape, np.bool_)
    goes_on[:, :-1] = parts[:, 1:] > 0
    kept = np.ones(parts.shape, np.bool_)
    kept[:, 1:] = goes_on[:, :-1]
    return ((parts & 0x7F) | goes_on.astype(np.uint64) << np.uint64(7)).astype(np.uint8)[kept].tobytes()


def _crc32c(content: bytes) -> bytes:
    """Return the CRC-32C that TensorStore appends to a chunk stored with that codec, in 4 bytes, little-endian."""
    context = ts.Context()
    metadata = {
        "shape": [len(content)],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [len(content)]}},
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    }
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}
    ts.open(spec, context=context, create=True).result().write(np.frombuffer(content, np.uint8)).result()
    return bytes(ts.KvStore.open("memory://", context=context).result().read("c/0").result().value[-4:])
