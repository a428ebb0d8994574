"""What a conversion says when it begins: what it will read and write, and in how much memory."""

from __future__ import annotations

import logging

from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.storage.room import free_bytes
from orbax_safetensors.streaming.tile_job import TileJob

# This logger is for that line alone: `cli/long_run.py` shows all that it gets.
logger = logging.getLogger(__name__)


def announce(job: TileJob, memory_bytes: int, left: int) -> None:
    """Log one line for a job of which all processes together will write `left` bytes of arrays, before compression.

    It is a warning if so many bytes do not fit, although compressed they may, and otherwise of level INFO. `Workspace`
    has refused what does not fit for certain. Of the source, about the same share is read. If nobody knows its size,
    because it is compressed and on an object store, the line has the bytes to write for those to read.
    """
    stored = job.source.stored_bytes
    read = left if stored is None else stored * left // max(job.nbytes, 1)
    text = f"{human_bytes(read)} to read, {human_bytes(left)} to write, {human_bytes(memory_bytes)} of memory at most"
    level, workspace = logging.INFO, job.sink.workspace
    if workspace.locked is not None and (free := free_bytes(workspace.path)) is not None:
        text += f", {human_bytes(free)} free"
        if not workspace.nbytes and left > free:
            text, level = f"{text}: may not fit unless it compresses", logging.WARNING
    logger.log(level, "Making %s from %s: %s", job.sink.path, job.source.path, text)
