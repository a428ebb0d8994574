"""The step that an item is in, which records the handlers of its items: by them, Orbax's managers of steps load it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from orbax_safetensors.orbax_store.directories import flush_names, is_on_gcs, names, read_json
from orbax_safetensors.orbax_store.discovery import (
    FINISHED_FILE,
    STEP_FILE,
    is_item,
    step_metadata,
    step_record,
)
from orbax_safetensors.orbax_store.operations import storage_errors


def record_in_step(path: str, handler: str, custom_metadata: Mapping[str, Any] | None, *, new: bool) -> None:
    """Record an item, which is finished, in the step that its parent directory is, if it is one.

    A step has a record; with `new`, a number as its name and no directories other than items are enough: without a
    record, it gets one of all its items, with `custom_metadata`, and is finished.
    """
    item = epath.Path(path)
    step = item.parent
    if is_on_gcs(path) and path.count("/") == 2:  # a whole bucket
        return
    with storage_errors(os.fspath(step)):
        record = read_json(step / STEP_FILE)
        if isinstance(record, dict) and isinstance(record.get("item_handlers"), dict):
            record["item_handlers"][item.name] = handler
            _write(step / STEP_FILE, json.dumps(record))
            return
        items = names(step, directories=True) if new and record is None and step.name.isdecimal() else []
        if not items or not all(is_item(step / name) for name in items):
            return
        handlers = {name: step_metadata(step / name).get("item_handlers", handler) for name in items}
        _write(step / STEP_FILE, step_record(handlers, custom_metadata, time.time_ns()))
        _write(step / FINISHED_FILE, f"Checkpoint commit was successful to {step}")


def _write(path: epath.Path, text: str) -> None:
    """Write a small file, which on a file system appears as a whole and is on the disk when this returns."""
    if is_on_gcs(path):
        path.write_text(text)
        return
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    flush_names(path.parent)
