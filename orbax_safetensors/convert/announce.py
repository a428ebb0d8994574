"""What a conversion says when it begins: what it will read and write, and in how much memory."""

from __future__ import annotations

import logging

from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.storage.room import free_bytes
from orbax_safetensors.streaming.tile_job import TileJob

# Has no other lines: the command line shows all of them.
logger = logging.getLogger(__name__)


def announce(job: TileJob, memory_bytes: int, left: int) -> None:
    """Log one line of level INFO for a job of which all processes together will write `left` bytes of arrays.

    Bytes are read about in proportion. An object store does not say how long the chunks of a checkpoint of Orbax are,
    which may be compressed; then as many bytes are announced as are written.
    """
    read = left if job.source.stored_bytes is None else job.source.stored_bytes * left // max(job.nbytes, 1)
    text = f"{human_bytes(read)} to read, {human_bytes(left)} to write, {human_bytes(memory_bytes)} of memory at most"
    workspace = job.sink.workspace
    if workspace.locked is not None and (free := free_bytes(workspace.path)) is not None:
        text += f", {human_bytes(free)} free"
    logger.info("Making %s of %s: %s", job.sink.path, job.source.path, text)
