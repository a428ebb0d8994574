"""One item of a checkpoint that is being written: its arrays, and the directory that they are in."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from orbax_safetensors.devices import trees
from orbax_safetensors.errors import StorageError, TensorMismatchError, storage_errors
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store._compat import PROCESS_SUBDIR_PREFIX, build_array_write_spec
from orbax_safetensors.orbax_store.directories import check_literal, is_on_gcs, kvstore, names, remove
from orbax_safetensors.orbax_store.discovery import (
    FINISHED_FILE,
    RECORD_FILE,
    STEP_FILE,
    TREE_FILE,
    unfinished_path,
)
from orbax_safetensors.orbax_store.index_check import index_faults
from orbax_safetensors.orbax_store.leaf import ARRAYS, SCALAR, OrbaxLeaf, box_of
from orbax_safetensors.orbax_store.metadata import finished_text, item_files
from orbax_safetensors.orbax_store.ocdbt import merge
from orbax_safetensors.orbax_store.operations import results

# A chunk's key, after the name of its array if that is not empty: `c/0/1` in Zarr 3, `0.1` in Zarr 2.
_CHUNK_KEYS = {
    True: re.compile(r"(?:(.*)/)?c((?:/\d+)*)", re.DOTALL),
    False: re.compile(r"(?:(.*)/)?(\d+(?:\.\d+)*)", re.DOTALL),
}
# TensorStore collects the chunks of one database, and writes one file of them at a time until they have this many
# bytes: so that it writes one file while another goes to the disk.
_DATA_FILE_BYTES = 64 << 20
# The key of an array's description, after its name.
_ARRAY_KEYS = {True: "zarr.json", False: ".zarray"}


@dataclass(frozen=True)
class OrbaxItem:
    """An item to write.

    Attributes:
      tree: a pytree with an `OrbaxLeaf` for every array, whose tiles are written, and Python or NumPy scalars and
        strings, which are saved as they are, as are empty nodes.
      custom_metadata: JSON of the item, which Orbax keeps beside the tree.
      ocdbt: store arrays in Orbax's database of few files rather than in one file for each chunk.
      zarr3: store them in version 3 of Zarr.
    """

    tree: Any
    custom_metadata: Any = None
    ocdbt: bool = True
    zarr3: bool = True


def array_name(items: Collection[str], item: str, name: str) -> str:
    """Return the name of an array of an item: if there are several items, after the name of its item."""
    return f"{item}/{name}" if len(items) > 1 else name


class ItemWriter:
    """Write an item, in its directory, or in that of the checkpoint if it is the only item."""

    def __init__(self, item: OrbaxItem, checkpoint: epath.Path, name: str, where: str, *, compression: bool) -> None:
        """Decide how arrays are stored, and write nothing. Without a `name`, `checkpoint` is the item's directory.

        Raises `TensorMismatchError`, which begins with `where`, if a leaf cannot be stored.
        """
        self._item, self._compression, self._where = item, compression, where
        self._final = checkpoint / name if name else None
        self.directory = unfinished_path(self._final) if self._final else checkpoint
        structure, named = trees.flatten(item.tree)
        leaves, self._values = _parted(named, where)
        if not item.ocdbt:  # names of arrays are those of directories
            for leaf in filter(None, named):
                check_literal(os.path.join(self.directory, leaf))
        # It caches nothing that was written.
        self._context = ocp.type_handlers.get_ts_context(use_ocdbt=item.ocdbt)
        specs = {name: self._write_spec(name, leaf) for name, leaf in leaves.items()}
        self._specs = {name: spec.json for name, spec in specs.items()}
        # Orbax may store an array in smaller chunks than a leaf asks for.
        self.leaves: Mapping[str, OrbaxLeaf] = {
            name: replace(leaf, write_shape=leaf.chunk_shape, chunk_shape=tuple(specs[name].metadata.chunk_shape))
            for name, leaf in leaves.items()
        }
        self._tree = jax.tree.unflatten(structure, [self.leaves.get(name, leaf) for name, leaf in named.items()])

    def _write_spec(self, name: str, leaf: OrbaxLeaf) -> Any:
        """Return Orbax's choice of how an array is stored, by this process."""
        info = ocp.type_handlers.ParamInfo(
            name=name,
            parent_dir=self.directory,
            is_ocdbt_checkpoint=self._item.ocdbt,
            use_zarr3=self._item.zarr3,
            use_compression=self._compression,
            ts_context=self._context,
            ocdbt_target_data_file_size=None if is_on_gcs(self.directory) else _DATA_FILE_BYTES,
        )
        return build_array_write_spec(
            info,
            global_shape=leaf.shape,
            local_shape=leaf.chunk_shape,
            dtype=leaf.dtype,
            use_ocdbt=self._item.ocdbt,
            process_index=jax.process_index() if self._item.ocdbt else None,
        )

    @property
    def directories(self) -> tuple[epath.Path, ...]:
        """Return where the item is while the checkpoint is unfinished: before and after the item is finished."""
        return () if self._final is None else (self._final, self.directory)

    @property
    def record(self) -> dict[str, Any]:
        """Return what is written, as JSON."""
        leaves = {
            name: [leaf.kind, leaf.dtype.name, list(leaf.shape), list(leaf.chunk_shape)]
            for name, leaf in self.leaves.items()
        }
        # A scalar may have been written already, with another dtype.
        scalars = {
            name: ["string", value] if isinstance(value, str) else ["scalar", np.asarray(value).dtype.name]
            for name, value in self._values.items()
        }
        return {"ocdbt": self._item.ocdbt, "zarr3": self._item.zarr3, "leaves": {**leaves, **scalars}}

    def create(self) -> None:
        """Make the directory, in that of the checkpoint. One process calls this, `reopen` and `finish`."""
        if self._final is not None and not is_on_gcs(self.directory):
            self.directory.mkdir()

    def reopen(self) -> None:
        """Remove all but the chunks, however far `finish` has come."""
        with storage_errors(f"{self.directory}: cannot be resumed"):
            if self._final is not None and self._final.exists() and not self.directory.exists():
                self._final.rename(self.directory)
            leaves = {*self.leaves, *self._values}
            tops = {name.split("/")[0] for name in leaves}
            for name in names(self.directory):
                if self._item.ocdbt:
                    kept = name.startswith(PROCESS_SUBDIR_PREFIX)
                else:  # an array without a name has its chunks beside the others' directories
                    kept = name in tops or ("" in leaves and bool(_CHUNK_KEYS[self._item.zarr3].fullmatch(name)))
                if not kept and (self._final is not None or name not in (RECORD_FILE, STEP_FILE)):
                    remove(self.directory / name)

    def open(self, primary: bool) -> dict[str, ts.TensorStore]:
        """Make the arrays, in the primary process only as Orbax does, and open them without reading."""
        if primary:
            results(self._opening(self._specs, create=True), os.fspath(self.directory))
        return results(self._opening(self._specs, assume_metadata=True), os.fspath(self.directory))

    def _opening(self, specs: Mapping[str, Any], **how: Any) -> Iterator[tuple[str, Any]]:
        for name, spec in specs.items():
            yield name, ts.open(ts.Spec(spec), open=True, context=self._context, **how)

    def chunks(self) -> dict[str, np.ndarray]:
        """Return for every array which of its chunks are in the store, over the grid of its chunks.

        Raises `TensorMismatchError` if there is a chunk that belongs to no array.
        """
        with storage_errors(os.fspath(self.directory)):
            roots = self._databases() if self._item.ocdbt else [os.fspath(self.directory)]
        return self._present(self._keys(roots))

    def _present(self, keys: Iterable[str]) -> dict[str, np.ndarray]:
        present = {name: np.zeros(leaf.grid, np.bool_) for name, leaf in self.leaves.items()}
        for key in keys:
            match = _CHUNK_KEYS[self._item.zarr3].fullmatch(key)
            name = (match[1] or "") if match else ""
            if match is None or name not in present:
                continue  # the metadata of an array, or a scalar
            grid = present[name]
            index = tuple(int(part) for part in re.findall(r"\d+", match[2]))[: grid.ndim]
            if len(index) != grid.ndim or any(at >= size for at, size in zip(index, grid.shape, strict=True)):
                raise TensorMismatchError(
                    f"{self.directory}: {name!r}: expected chunks below {grid.shape}, found chunk {index}"
                )
            grid[index] = True
        return present

    def _keys(self, roots: Iterable[str]) -> Iterator[str]:
        # A new context, so that the list is not one that was cached before.
        context = ocp.type_handlers.get_ts_context(use_ocdbt=self._item.ocdbt)
        with storage_errors(os.fspath(self.directory)):
            for root in roots:
                for key in kvstore(root, context, ocdbt=self._item.ocdbt).list().result():
                    yield os.fsdecode(key)

    def finish(self) -> None:
        """Add what belongs to the arrays, merge what the processes have written, and give the directory its name.

        Raises `TensorMismatchError` if chunks are missing, and `StorageError` if something else is.
        """
        self._write_scalars()
        files = item_files(
            trees.nodes(self._tree),
            custom_metadata=self._item.custom_metadata,
            ocdbt=self._item.ocdbt,
            zarr3=self._item.zarr3,
            process_count=jax.process_count(),
        )
        for name, content in files.items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content.decode())
        if self._item.ocdbt:
            merge(self._databases(), os.fspath(self.directory))
        self._check_whole()
        if self._final is not None:
            (self.directory / FINISHED_FILE).write_text(finished_text(self._final))
            if self.directory != self._final:
                self.directory.rename(self._final)

    def _write_scalars(self) -> None:
        arrays = {name: np.asarray(value) for name, value in self._values.items() if not isinstance(value, str)}
        specs = {
            name: self._write_spec(name, OrbaxLeaf((), array.dtype, (), SCALAR)).json for name, array in arrays.items()
        }
        stores = results(self._opening(specs, create=True), os.fspath(self.directory))
        results(((name, stores[name].write(array)) for name, array in arrays.items()), os.fspath(self.directory))

    def _databases(self) -> list[str]:
        """Return the directories of the databases of all processes."""
        inside = names(self.directory)
        return [os.path.join(self.directory, name) for name in inside if name.startswith(PROCESS_SUBDIR_PREFIX)]

    def _check_whole(self) -> None:
        """Raise the errors of `finish`. The store that a reader opens is listed once, and no array is opened.

        An index has the keys of values whose bytes another run, or a disk, has taken away.
        """
        keys = set(self._keys([os.fspath(self.directory)]))
        scalars = [name for name, value in self._values.items() if not isinstance(value, str)]
        for name in (*self.leaves, *scalars):
            key = f"{name}/{_ARRAY_KEYS[self._item.zarr3]}".removeprefix("" if name else "/")
            if key not in keys:
                raise StorageError(f"{self._where}: {name!r}: was not stored: {key!r} is missing")
        if TREE_FILE not in names(self.directory):
            raise StorageError(f"{self._where}: {TREE_FILE} was not stored")
        if self._item.ocdbt and (faults := index_faults(os.fspath(self.directory), {}, names_tensors=False)):
            raise StorageError(f"{self._where}: was not stored: {faults[0]}; begin anew without resume")
        lacking = {name: present for name, present in self._present(keys).items() if not present.all()}
        if lacking:
            name, present = next(iter(lacking.items()))
            index = np.argwhere(~present)[0].tolist()
            raise TensorMismatchError(
                f"{self._where}: {len(lacking)} of {len(self.leaves)} arrays are not complete: {(~present).sum()} "
                f"chunks of {name!r} were not written, the first is "
                f"{box_of(Box((at, at + 1) for at in index), self.leaves[name])}"
            )


def _parted(named: Mapping[str, Any], where: str) -> tuple[dict[str, OrbaxLeaf], dict[str, Any]]:
    """Return the leaves that are streamed, and the values of the others."""
    leaves, values = {}, {}
    for name, leaf in named.items():
        if isinstance(leaf, OrbaxLeaf):
            leaves[name] = _checked(leaf, f"{where}: {name!r}")
        elif isinstance(leaf, int | float | np.number | str):
            values[name] = leaf
        else:
            raise TensorMismatchError(
                f"{where}: {name!r}: expected an OrbaxLeaf, a scalar or a string, found {type(leaf).__name__}"
            )
    if not leaves and not values:
        raise TensorMismatchError(f"{where}: the tree has no leaf")
    return leaves, values


def _checked(leaf: OrbaxLeaf, where: str) -> OrbaxLeaf:
    """Return a leaf that Orbax can store; raises `TensorMismatchError` if it cannot."""
    if leaf.kind not in ARRAYS:
        raise TensorMismatchError(f"{where}: expected the value of a leaf of kind {leaf.kind!r}, found an OrbaxLeaf")
    if not all(leaf.shape):
        raise TensorMismatchError(f"{where}: Orbax stores no array without elements, and its shape is {leaf.shape}")
    if len(leaf.chunk_shape) != len(leaf.shape) or not all(
        1 <= chunk <= size for chunk, size in zip(leaf.chunk_shape, leaf.shape, strict=True)
    ):
        raise TensorMismatchError(f"{where}: {leaf.chunk_shape} is not a shape of chunks of an array of {leaf.shape}")
    try:
        ts.dtype(leaf.dtype.name)
    except ValueError as error:
        raise TensorMismatchError(f"{where}: arrays of {leaf.dtype} cannot be stored") from error
    return replace(leaf, shape=tuple(map(int, leaf.shape)), chunk_shape=tuple(map(int, leaf.chunk_shape)))
