"""Which finished checkpoint a path stands for: the directories of its items, and what else is in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.format.foreign import ORBAX_TREE
from orbax_safetensors.orbax_store.directories import fresh, is_on_gcs, names, read_json
from orbax_safetensors.storage.whereabouts import CONVERSION_RECORD, RESUME, directory_hint

TREE_FILE = ORBAX_TREE
STRINGS_FILE = "_strings.json"
# Has a file of each process, with its record of the arrays.
ARRAYS_DIRECTORY = "array_metadatas"
STEP_FILE = "_CHECKPOINT_METADATA"
RECORD_FILE = CONVERSION_RECORD
FINISHED_FILE = ocp.path.atomicity.COMMIT_SUCCESS_FILE
UNFINISHED = ocp.path.atomicity.TMP_DIR_SUFFIX
# Orbax's names of steps: a number after an optional prefix.
_STEP = re.compile(r"(?:.*_)?(\d+)")


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A finished checkpoint.

    Attributes:
      directory: the directory of the items, or the item itself.
      step: the name of the directory, if it is one of several steps; None for a checkpoint on its own.
      items: the names of the items that are trees; `""` alone if `directory` is the item.
      others: the names of what else belongs to it; none if the path was that of an item.
      whole: the directory that Orbax has finished: `directory`, or the one that has this item and others.
    """

    directory: epath.Path
    step: str | None
    items: tuple[str, ...]
    others: tuple[str, ...]
    whole: epath.Path

    def item(self, name: str) -> epath.Path:
        """Return the directory of an item."""
        return self.directory / name if name else self.directory


def unfinished_path(path: epath.Path) -> epath.Path:
    """Return where Orbax has a directory until it is finished: beside its place, or in it on an object store."""
    return path if is_on_gcs(path) else path.with_name(f"{path.name}{UNFINISHED}")


def find_finished(path: epath.Path) -> FinishedCheckpoint:
    """Return the checkpoint that `path` is: an item, a step, or the latest finished step of a directory of steps.

    Raises `StorageError` if none is finished.
    """
    path = fresh(path)
    if not path.is_dir():
        expected = f"{path}: expected the directory of an Orbax checkpoint"
        if path.exists():
            raise StorageError(f"{expected}, found a file")
        raise MissingError(f"{expected}, found nothing")
    for directory in (path, path.parent):
        if UNFINISHED in directory.name:
            how = _resume([directory]) or f": Orbax renames {directory} when a checkpoint is complete"
            raise StorageError(f"{path}: was never finished{how}")
    inside = names(path)
    if STEP_FILE in inside:
        _check_finished(path)
    elif (path.parent / STEP_FILE).exists():
        _check_finished(path.parent)
    if TREE_FILE in inside:
        _check_finished(path)
        return _of_item(path)
    directories = names(path, directories=True)
    numbers = {name: int(match[1]) for name in directories if (match := _STEP.fullmatch(name))}
    items = [name for name in directories if name not in numbers and is_item(path / name)]
    if items or STEP_FILE in inside:
        items = sorted(items + [name for name in numbers if is_item(path / name)])
        if not items:
            raise StorageError(f"{path}: expected an item, a directory with {TREE_FILE}; found {directories}")
        for name in items:
            _check_finished(path / name)
        kept = {*items, STEP_FILE, FINISHED_FILE, RECORD_FILE}
        others = tuple(name for name in inside if name not in kept and UNFINISHED not in name)
        return FinishedCheckpoint(
            path, path.name if step_number(path.name) is not None else None, tuple(items), others, path
        )
    for name in sorted(numbers, key=numbers.__getitem__, reverse=True):
        if not _is_finished(path / name):
            continue
        if is_item(path / name):
            return FinishedCheckpoint(path / name, name, ("",), (), path / name)
        if _is_step(path / name):
            return replace(find_finished(path / name), step=name)
    unfinished = [
        name for name in directories if UNFINISHED in name or (name in numbers and not _is_finished(path / name))
    ]
    found = (
        f"; {unfinished} were never finished{_resume([path / name for name in unfinished])}"
        if unfinished
        else f", and no .safetensors file{directory_hint(str(path), inside)}"
    )
    raise MissingError(f"{path}: holds no finished checkpoint of Orbax{found}")


def _resume(unfinished: Iterable[epath.Path]) -> str:
    """Return how to go on if this package has begun one of these directories, and otherwise nothing."""
    return f": {RESUME}" if any(RECORD_FILE in names(directory) for directory in unfinished) else ""


def step_number(name: str) -> int | None:
    """Return the number of a step by the name of its directory, or None if that is not a name of a step."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def step_metadata(directory: epath.Path) -> dict[str, Any]:
    """Return the record of a checkpoint that Orbax has finished in a directory, except times; {} if there is none."""
    path = directory / STEP_FILE
    content = read_json(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StorageError(f"{path}: is not what Orbax writes: expected a dict, found {content!r:.80}")
    return {key: value for key, value in content.items() if not key.endswith("_timestamp_nsecs")}


def recorded_metadata(checkpoint: FinishedCheckpoint) -> dict[str, Any]:
    """Return the record of a checkpoint, with the handlers of the items in it.

    Items that were saved alone, into a directory without a record, each have a record.
    """
    item_records = {name: step_metadata(checkpoint.item(name)) for name in checkpoint.items}
    whole = step_metadata(checkpoint.whole)
    handlers = {name: metadata.get("item_handlers") for name, metadata in item_records.items()}
    step_handlers = whole.get("item_handlers")
    if isinstance(step_handlers, dict):
        handlers |= {
            name: step_handlers[name] for name in (*checkpoint.items, *checkpoint.others) if name in step_handlers
        }
        if checkpoint.whole != checkpoint.directory:
            handlers = {"": step_handlers.get(checkpoint.directory.name)}
    kept = {key: value for metadata in (*item_records.values(), whole) for key, value in metadata.items()}
    named = {name: handler for name, handler in handlers.items() if handler is not None}
    kept["item_handlers"] = handlers[""] if checkpoint.items == ("",) else named
    return kept


def _of_item(path: epath.Path) -> FinishedCheckpoint:
    """Return an item by its path. A directory whose name is a number alone is a step."""
    parent = path.parent
    if not ((parent / STEP_FILE).exists() or parent.name.isdecimal()):
        return FinishedCheckpoint(path, None, ("",), (), path)
    if step_number(parent.name) is None:
        return FinishedCheckpoint(path, None, ("",), (), parent)
    return FinishedCheckpoint(parent, parent.name, (path.name,), (), parent)


def is_item(path: epath.Path) -> bool:
    """Return whether a directory is an item that is a tree, and is not unfinished by its name."""
    return UNFINISHED not in path.name and TREE_FILE in names(path)


def _is_step(path: epath.Path) -> bool:
    inside = names(path)
    return STEP_FILE in inside or any((path / name / TREE_FILE).exists() for name in inside)


def _is_finished(path: epath.Path) -> bool:
    """Return whether an item or a step is finished. Orbax renames those of file systems, so their names tell."""
    return not is_on_gcs(path) or FINISHED_FILE in names(path)


def _check_finished(path: epath.Path) -> None:
    if not _is_finished(path):
        raise StorageError(f"{path}: was never finished: Orbax writes {FINISHED_FILE} when a checkpoint is complete")
