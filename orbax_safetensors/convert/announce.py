"""What a conversion says when it begins: what it will read and write, and in how much memory."""

from __future__ import annotations

import logging

from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.storage.room import free_bytes
from orbax_safetensors.streaming.tile_job import TileJob

# Has no other lines: the command line shows all of them.
logger = logging.getLogger(__name__)


def announce(job: TileJob, memory_bytes: int, left: int) -> None:
    """Log one line for a job of which all processes together will write `left` bytes of arrays, before compression.

    The line is a warning if so many bytes do not fit, although compressed they may, and otherwise of level INFO. Of the
    source, about the same share is read. If nobody knows its size, because it is compressed and on an object store, the
    line has the bytes to write for those to read.
    """
    stored = job.source.stored_bytes
    read = left if stored is None else stored * left // max(job.nbytes, 1)
    text = f"{human_bytes(read)} to read, {human_bytes(left)} to write, {human_bytes(memory_bytes)} of memory at most"
    level, workspace = logging.INFO, job.sink.workspace
    if workspace.locked is not None and (free := free_bytes(workspace.path)) is not None:
        text += f", {human_bytes(free)} free"
        level = logging.WARNING if left > free else level
    logger.log(level, "Making %s of %s: %s", job.sink.path, job.source.path, text)
