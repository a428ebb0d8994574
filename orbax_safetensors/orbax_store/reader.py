"""`open_orbax` and `open_step`: what a checkpoint holds, and boxes of its arrays read into memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from orbax_safetensors.errors import SafetensorsError, StorageError, TensorMismatchError, storage_errors
from orbax_safetensors.format.names import hint
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store._compat import build_kvstore_tspec
from orbax_safetensors.orbax_store.directories import (
    absolute,
    check_files,
    file_bytes,
    names,
    read_bytes,
    read_json,
    state,
)
from orbax_safetensors.orbax_store.discovery import (
    ARRAYS_DIRECTORY,
    STRINGS_FILE,
    TREE_FILE,
    FinishedCheckpoint,
    find_finished,
    recorded_metadata,
    step_metadata,
)
from orbax_safetensors.orbax_store.leaf import (
    JAX_ARRAY,
    RANDOM_KEY,
    SCALAR,
    STRING,
    OrbaxLeaf,
    box_of,
    chunks_of,
    cut,
    touched_nbytes,
)
from orbax_safetensors.orbax_store.metadata import RecordedTree
from orbax_safetensors.orbax_store.operations import Budget, Operations
from orbax_safetensors.orbax_store.shardings import SHARDING_FILE, parse_shardings, warn
from orbax_safetensors.storage.paths import PathLike

# The file of a process in `ARRAYS_DIRECTORY`.
PROCESS = re.compile(r"process_(\d+)")

# The most decoded bytes of one TensorStore read: enough to keep the decoders of several cores busy.
_READ_BYTES = 64 << 20

# The most bytes of a chunk's file that are not of its elements, and of a file that describes an array.
_FILE_OVERHEAD = 1 << 20

# A chunk is in memory twice, encoded and decoded, before it is in the caller's memory.
_COPIES = 2


@dataclass(frozen=True, eq=False)
class OrbaxCheckpoint:
    """A finished checkpoint.

    Attributes:
      path: the directory of the item, or its URL.
      whole: the directory that Orbax has finished with the item in it: a step, or the item itself.
      leaves: by key path, joined by dots.
      custom_metadata: what the user has saved with the step.
      ocdbt: whether arrays are stored in Orbax's database rather than in one file for each chunk.
      recorded: the tree, with what the user has saved with the item, and the version of Zarr.
    """

    path: str
    whole: str
    leaves: Mapping[str, OrbaxLeaf]
    custom_metadata: dict[str, Any]
    ocdbt: bool
    recorded: RecordedTree = field(repr=False)
    _stores: Mapping[str, ts.TensorStore] = field(repr=False)
    _budget: Budget = field(repr=False)
    _read_bytes: int = field(repr=False)
    _checked: set[str] = field(repr=False, default_factory=set)  # the arrays whose files may be opened

    def tree(self, leaf: Callable[[str, OrbaxLeaf], Any]) -> Any:
        """Return the tree of dicts and lists with `leaf(name, facts)` for its leaves, and its empty nodes."""
        return self.recorded.map(lambda name: leaf(name, self.leaves[name]))

    def read(self, name: str, box: Box, out: np.ndarray) -> Future[None]:
        """Begin to fill `out` with the elements of `box`.

        Chunks that a box touches in part are read and decoded whole. Waits while the checkpoint's budget is in flight.
        Safe from any thread; `out` must not be used before the future is done, even if it fails with `StorageError`.
        """
        where = f"{self.path}: {name!r}"
        leaf = self._leaf(name)
        operations = Operations(where)
        failure = None
        try:
            with storage_errors(where):
                self._check_chunks(name)
                target = ts.array(out, copy=False, write=True)[ts.d[:].translate_to[box.start]]
                for chunks in cut(chunks_of(box, leaf), leaf, self._read_bytes) if out.size else ():
                    if operations.failed:
                        break
                    whole = box_of(chunks, leaf)
                    part = whole.overlap(box).slices
                    touched = touched_nbytes(whole, leaf)
                    acquired_bytes = self._budget.acquire(_COPIES * touched)
                    try:
                        operation = target[part].write(self._stores[name][part]).commit
                    except BaseException:
                        self._budget.release(acquired_bytes)
                        raise
                    operations.add(operation, self._budget, acquired_bytes)
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            operations.close(failure)
        return operations.future

    def value(self, name: str) -> Any:
        """Return a whole leaf: an array, a string, or a NumPy scalar, whose dtype a Python scalar would lose."""
        leaf = self._leaf(name)
        if leaf.kind == STRING:
            with storage_errors(f"{self.path}: {name!r}"):
                spec = {
                    "driver": "json",
                    "kvstore": build_kvstore_tspec(self.path, STRINGS_FILE, use_ocdbt=False),
                    "json_pointer": f"/{name}",  # unescaped, as Orbax writes it
                }
                return str(ts.open(spec, read=True, open=True).result().read().result().item())
        out: np.ndarray = np.empty(leaf.shape, leaf.dtype)
        self.read(name, Box.whole(leaf.shape), out).result()
        if leaf.kind != SCALAR:
            return out
        return out[()] if isinstance(out[()], np.number) else out.item()

    def incomplete(self) -> Iterator[StorageError]:
        """Yield an error for each array of which chunks are missing, unless missing chunks are zeros."""
        if not self.recorded.zeros_stored:
            return
        stored = {name: store.storage_statistics(query_fully_stored=True) for name, store in self._stores.items()}
        for name, future in stored.items():
            try:
                with storage_errors(f"{self.path}: {name!r}"):
                    if not future.result().fully_stored:
                        raise StorageError(f"{self.path}: {name!r}: chunks are missing")
            except StorageError as fault:
                yield fault

    def stored_bytes(self) -> int | None:
        """Return the bytes of all of its files, encoded as they are; None on an object store."""
        with storage_errors(self.path):
            return file_bytes(self.path)

    def state(self) -> dict[str, Any]:
        """Return what tells whether a file has changed, by its path; raises `StorageError` if that is unknown."""
        with storage_errors(self.path):
            return state(self.path)

    def _check_chunks(self, name: str) -> None:
        """Raise `StorageError` if the file of a chunk is longer than any encoding: TensorStore would read all of it."""
        if self.ocdbt or name in self._checked:
            return
        store = self._stores[name]
        chunk_nbytes = (
            prod(int(size or 0) for size in store.chunk_layout.write_chunk.shape or ())
            * store.dtype.numpy_dtype.itemsize
        )
        check_files(f"{self.path}/{name}", 2 * chunk_nbytes + _FILE_OVERHEAD)
        self._checked.add(name)

    def _leaf(self, name: str) -> OrbaxLeaf:
        if name not in self.leaves:
            raise TensorMismatchError(f"{self.path}: has no leaf {name!r}{hint(name, self.leaves)}")
        return self.leaves[name]


@dataclass(frozen=True, eq=False)
class OrbaxStep:
    """A finished checkpoint with all of its items.

    Attributes:
      path: the directory of the items, or the item itself; or its URL.
      whole: as in `OrbaxCheckpoint`.
      step: the name of the directory, if it is one of several steps; None for a checkpoint on its own.
      items: the items that are trees, by name; `""` alone if `path` is the item.
      others: the paths of what else belongs to it, by name; none if it was opened by the path of an item.
      metadata: Orbax's record of it, except times.
    """

    path: str
    whole: str
    step: str | None
    items: Mapping[str, OrbaxCheckpoint]
    others: Mapping[str, str]
    metadata: Mapping[str, Any]

    @property
    def item_path(self) -> str:
        """The directory that Orbax restores arrays from: the only item's. If there are several, that of the step."""
        return self.path if len(self.items) > 1 else next(iter(self.items.values())).path

    def stored_bytes(self) -> int | None:
        """Return the bytes of all that belongs to it, as `OrbaxCheckpoint.stored_bytes` does."""
        with storage_errors(self.path):
            if self.others or "" in self.items:
                return file_bytes(self.path)
            sizes = [item.stored_bytes() for item in self.items.values()]
            return None if None in sizes else sum(size or 0 for size in sizes)

    def state(self) -> dict[str, Any]:
        """Return the state of all that belongs to it, as `OrbaxCheckpoint.state` does."""
        with storage_errors(self.path):
            if self.others or "" in self.items:
                return state(self.path)
            return {f"{name}/{file}": now for name in self.items for file, now in self.items[name].state().items()}


def open_orbax(path: PathLike, *, memory_bytes: int = 128 << 20) -> OrbaxCheckpoint:
    """Open a checkpoint that Orbax has finished; `read` and `value` read its leaves.

    `path` is the directory of an item, of a step that has one item, or of steps, whose latest is opened; or such a
    directory's `gs://` URL. Reads take at most `memory_bytes` besides the memory that they fill, or what one chunk
    needs.

    Raises `StorageError` if there is no finished checkpoint, and `TensorMismatchError` if it has a leaf of a kind that
    is not known here.
    """
    finished = find(path)
    if len(finished.items) > 1:
        raise StorageError(
            f"{finished.directory}: holds several items, give the directory of one: {list(finished.items)}"
        )
    return open_item(finished, finished.items[0], Budget(memory_bytes))


def open_step(path: PathLike, *, memory_bytes: int = 128 << 20) -> OrbaxStep:
    """Open a checkpoint as `open_orbax` does, with all of its items, which read with `memory_bytes` together.

    Raises as `open_orbax`, except for several items.
    """
    finished = find(path)
    budget = Budget(memory_bytes)
    items = {name: open_item(finished, name, budget) for name in finished.items}
    with storage_errors(os.fspath(finished.directory)):
        return OrbaxStep(
            path=os.fspath(finished.directory),
            whole=os.fspath(finished.whole),
            step=finished.step,
            items=items,
            others={name: os.fspath(finished.directory / name) for name in finished.others},
            metadata=recorded_metadata(finished),
        )


def find(path: PathLike) -> FinishedCheckpoint:
    """Return the finished checkpoint that `path` is; `StorageError` if it is none."""
    path = absolute(path)
    with storage_errors(path):
        return find_finished(epath.Path(path))


def _refuse(fault: SafetensorsError) -> None:
    raise fault


def open_item(
    finished: FinishedCheckpoint,
    name: str,
    budget: Budget,
    report: Callable[[SafetensorsError], None] = _refuse,
    unknown: Callable[[StorageError], None] = warn,
) -> OrbaxCheckpoint:
    """Return the item `name`, without arrays that do not open, each of whose faults is passed to `report`.

    `unknown` is as for `parse_shardings`.
    """
    directory = finished.item(name)
    item = os.fspath(directory)
    check_files(item)
    tree = RecordedTree.parse(read_bytes(directory / TREE_FILE), item)
    ocdbt = tree.ocdbt
    if ocdbt is None:
        with storage_errors(item):
            ocdbt = ocp.type_handlers.is_ocdbt_checkpoint(directory)
    context = ocp.type_handlers.get_ts_context(use_ocdbt=ocdbt)
    opening = {}
    for name, kind in tree.leaves.items():
        if kind == STRING:
            continue
        info = ocp.type_handlers.ParamInfo(
            name=name,
            parent_dir=directory,
            is_ocdbt_checkpoint=ocdbt,
            use_zarr3=tree.zarr3,
            ts_context=context,
        )
        with storage_errors(f"{item}: {name!r}"):
            spec = ocp.type_handlers.get_json_tspec_read(
                info,
                use_ocdbt=ocdbt,
                raise_array_data_missing_error=tree.zeros_stored,
            )
            opening[name] = ts.open(ts.Spec(spec), open=True, read=True, context=context)
    stores = {}
    for name, future in opening.items():
        try:
            with storage_errors(f"{item}: {name!r}"):
                stores[name] = future.result()
        except StorageError as fault:
            report(fault)
    with storage_errors(item):
        shardings = parse_shardings(read_bytes(directory / SHARDING_FILE), item, unknown)
        random_keys = _random_keys(directory)
    leaves = {
        name: _leaf(kind, stores.get(name), shardings.get(name), random_keys.get(name))
        for name, kind in tree.leaves.items()
        if name in stores or kind == STRING
    }
    recorded_with = step_metadata(directory) or step_metadata(finished.whole)
    return OrbaxCheckpoint(
        path=item,
        whole=os.fspath(finished.whole),
        leaves=leaves,
        custom_metadata=recorded_with.get("custom_metadata") or {},
        ocdbt=ocdbt,
        recorded=tree,
        _stores=stores,
        _budget=budget,
        _read_bytes=min(_READ_BYTES, budget.nbytes // (2 * _COPIES)),
    )


def _leaf(kind: str, store: ts.TensorStore | None, sharding: Any, random_key: str | None) -> OrbaxLeaf:
    if store is None:
        return OrbaxLeaf((), np.dtype(np.str_), (), STRING)
    return OrbaxLeaf(
        shape=tuple(store.shape),
        dtype=np.dtype(store.dtype.numpy_dtype),
        # What is decoded as one; Zarr 3 may keep several in what it writes as one.
        chunk_shape=tuple(int(size or 0) for size in store.chunk_layout.read_chunk.shape or ()),
        kind=kind,
        sharding=sharding if kind == JAX_ARRAY else None,
        random_key=random_key,
    )


def _random_keys(item: epath.Path) -> dict[str, str]:
    """Return the implementations of random keys whose data leaves are, by name. The file of each process has all."""
    directory = item / ARRAYS_DIRECTORY
    files = [name for name in names(directory) if PROCESS.fullmatch(name)] if directory.exists() else []
    if not files:
        return {}
    content = read_json(directory / files[0])
    with storage_errors(f"{directory / files[0]}: is not what Orbax writes"):
        arrays = [entry["array_metadata"] for entry in content["array_metadatas"]]
        return {
            array["param_name"]: array["ext_metadata"][RANDOM_KEY]
            for array in arrays
            if (array.get("ext_metadata") or {}).get(RANDOM_KEY)
        }
