"""Prepare a save: the same copies as in a restore, with the arrows reversed.

Every process writes the shards that it owns straight into their final place in the final files. Headers and the index
follow from the tree's shapes alone. A save writes headers last: until then no file is valid, and nothing restores. It
writes the index for Orbax before the headers, and renames it after them.
On a store whose files appear whole, such as an object store, one process writes each file in order, and the index is
last.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import new_key, together
from orbax_safetensors.devices.sharding import placement
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.layout import Layout, avoiding
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.save.contents import Contents, contents_of
from orbax_safetensors.save.destination import Existing, check_kept, make_room
from orbax_safetensors.save.index import NO_INDEX, IndexAs, SavedIndex, saved_index
from orbax_safetensors.save.pieces import Views, files_of_process, numbered, places_in, unnamed
from orbax_safetensors.save.whole import Delivery, assign_files, deliveries, part_of_process
from orbax_safetensors.save.writers import Owned, grouped, in_file_order, written_here
from orbax_safetensors.storage.paths import PathLike, as_text
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Store
from orbax_safetensors.transfer.plan import Location, locations

logger = logging.getLogger(__name__)

_NO_INDEX_OF_PIECES = (
    "several processes save pieces of tensors to an object store, and Orbax cannot find tensors in pieces; save with "
    "SafetensorsOptions(whole_tensors=True), or without index=True"
)


@dataclass(frozen=True)
class Save:
    """A planned save: the layout of all files, and the shards that this process writes.

    Every process plans the same saves, in the same order, each from the same tree.
    """

    layout: Layout
    model_files: ModelFiles
    groups: tuple[tuple[Owned, ...], ...]
    key: str
    active: ActiveProcesses
    options: SafetensorsOptions
    places: Mapping[str, Location]  # where tensors lie in the files, or this process's pieces of them
    views: Views | None  # of pieces, if this process alone writes the files of `layout`
    index: SavedIndex | None = None  # written by the primary process
    deliveries: tuple[Delivery, ...] | None = None  # of whole tensors, to the processes that write them
    replaces: bool = False  # objects that are there


def prepare_save(
    item: Any,
    save_args: Any = None,
    *,
    directory: PathLike,
    metadata: Mapping[str, str] | None,
    max_file_bytes: int,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    config: Any = None,
    like: PathLike | None = None,
    options: SafetensorsOptions,
    existing: Existing = "kept",
    index: IndexAs = NO_INDEX,
    active: ActiveProcesses | None = None,
) -> Save:
    """Check a tree, lay out its files and assign its shards to processes; `active`, or all processes, do so together.

    `directory` is the destination, the same in every process; it need not exist yet. `existing` says what happens to
    files that are already there. See `SafetensorsSave` for the other arguments.

    Raises `TensorMismatchError`, `MappingError` or `HeaderError`, in every process, if the tree or the metadata cannot
    be stored or differs between processes, and `StorageError` if `make_room` refuses `directory`.
    """
    directory = as_text(directory)
    active = active or ActiveProcesses.all()
    key = new_key("save", directory, active)

    def shared_save() -> _SharedSave:
        if existing == "replaced":
            check_kept(directory, config, like)
        contents = contents_of(
            directory,
            item,
            save_args,
            metadata=metadata,
            max_file_bytes=max_file_bytes,
            family=family,
            variant=variant,
            config=config,
            like=like,
            options=options,
        )
        groups = tuple(written_here(grouped(contents.leaves), active))
        store, path = store_of(directory, options.storage_options)
        replaces = existing == "replaced"
        # Files of another checkpoint stay as they are until the new checkpoint is complete.
        taken = frozenset(store.list(path) or ()) if replaces and store.writes else frozenset()
        layout = avoiding(contents.layout(max_file_bytes, options.alignment), taken)
        save = Save(
            layout, contents.model_files, groups, key, active, options, locations(layout), views=None, replaces=replaces
        )
        plan = _SharedSave(contents, save, store, path, taken)
        if not plan.store.is_local and active.count > 1:
            return plan  # this process then lays out other files
        plan = plan._replace(save=replace(save, index=indexed(plan, layout)))
        if plan.store.is_local and active.is_primary:
            make_room(plan.store, plan.path, existing)
        return plan

    def indexed(plan: _SharedSave, layout: Layout) -> SavedIndex | None:
        return _indexed(plan, layout, index)

    plan = together(f"{key}/plan", shared_save, _digest, active=active, timeout_secs=options.join_timeout_secs)
    if plan.store.is_local:
        return plan.save
    in_pieces = active.count > 1 and not (options.whole_tensors or plan.contents.is_adapter)

    def prepared() -> Save:
        if in_pieces:
            if index.wanted:
                raise TensorMismatchError(f"{directory}: {_NO_INDEX_OF_PIECES}")
            save = _pieces_of_process(plan, max_file_bytes)
        elif active.count > 1:
            save = _whole_tensors(plan, max_file_bytes, partial(indexed, plan))
        else:
            save = plan.save
        if active.is_primary:
            make_room(plan.store, plan.path, existing)
        return replace(save, groups=tuple(in_file_order(save.groups, save.views, save.places)))

    save = together(f"{key}/pieces", prepared, active=active)
    return replace(save, layout=numbered(key, save.layout, active, plan.taken)) if in_pieces else save


class _SharedSave(NamedTuple):
    """A save to files that all processes write into, and what it takes to plan other files from it."""

    contents: Contents
    save: Save
    store: Store
    path: str  # of the directory, as the store has it
    taken: frozenset[str]  # names of files that the new ones must not have


def _pieces_of_process(plan: _SharedSave, max_file_bytes: int) -> Save:
    """Return the same save to files that this process alone writes, with the shards that it owns, without names yet."""
    headers, contents, views = files_of_process(
        [owned for group in plan.save.groups for owned in group],
        plan.contents.tensors,
        plan.contents.metadata,
        max_file_bytes=max_file_bytes,
        alignment=plan.save.options.alignment,
        process=plan.save.active.rank,
    )
    return replace(plan.save, layout=unnamed(headers), places=places_in(headers, contents), views=views)


def _whole_tensors(plan: _SharedSave, max_file_bytes: int, indexed: Callable[[Layout], SavedIndex | None]) -> Save:
    """Return the same save to files with one writer each, to which the other processes send their shards."""
    active = plan.save.active
    files = plan.contents.layout(max_file_bytes, plan.save.options.alignment, writers=active.count)
    files = avoiding(files, plan.taken)
    owners = assign_files(files, active.count)
    layout, places = part_of_process(files, owners, active.rank)
    sent = tuple(deliveries(plan.contents.leaves, files, owners, active))
    return replace(plan.save, layout=layout, groups=(), places=places, deliveries=sent, index=indexed(files))


def _indexed(plan: _SharedSave, layout: Layout, index: IndexAs) -> SavedIndex | None:
    """Return the index of whole tensors in the files of `layout`.

    Without a possible index, return None, or raise `TensorMismatchError` if the caller requires one.
    """
    if index.wanted is False:
        return None
    made = saved_index(
        plan.contents.item,
        plan.contents.leaves,
        layout,
        locations(layout),
        use=plan.contents.model_files.use,
        zarr3=index.zarr3,
        whole_tree=index.whole_tree,
    )
    if isinstance(made, SavedIndex):
        return made
    if index.wanted:
        raise TensorMismatchError(f"{plan.path}: Orbax cannot read this save, as index=True requires: {made}")
    logger.info("%s: is saved without an index for Orbax: %s", plan.path, made)
    return None


def _digest(plan: _SharedSave) -> str:
    """Return a digest that is equal in processes that save the same files from arrays sharded and ordered alike."""
    model_files = plan.save.model_files
    digest = hashlib.sha256(f"{json.dumps(model_files.config)}\0{sorted(model_files.names)}\0".encode())
    for _, header in plan.save.layout.files:
        digest.update(header.encoded)
    for leaf in plan.contents.leaves:
        if isinstance(leaf.value, jax.Array):
            digest.update(placement(leaf.value.sharding, leaf.shape).encode())
        # Boxes are assigned to processes in this order. Headers have the name, so it can be encoded.
        digest.update(f"{leaf.name}\0{leaf.view!r}\0".encode())
    return digest.hexdigest()
