"""Headers that the processes of a program read once for all of them, and send each other.

They go through the key-value store of `jax.distributed`. No process has to come: what others do not send within a few
seconds is read by each process that needs it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Sequence

import jax

from orbax_safetensors.checkpoint.header_texts import StoredText, decode, encode, read_all, read_text
from orbax_safetensors.devices.agreement import publish, published, withdraw
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.format.digest import digest_of
from orbax_safetensors.storage.store import Store

logger = logging.getLogger(__name__)

# Fewer processes read all headers themselves: they would save few requests.
MIN_PROCESSES = 9
# Processes that read. More would be soon done reading, but each part is a request of every process to the one that has
# the key-value store: of thousands of processes, that would take longer than to read.
_PARTS = 8
# How long a process waits for the others, all in all.
_WAIT_SECONDS = 5.0

# What this process has published. A slower process may still be at the open before the last.
_published: deque[str] = deque()


def shared_texts(store: Store, paths: Sequence[str], key: str) -> dict[str, StoredText]:
    """Read this process's part of the headers at `paths`, and return by path what all processes have read of them.

    All processes call this with the same `key`, which no other call has. What is missing of the result, the caller
    reads: the part of a process that failed, that does not come, or that finds other files.
    """
    here = jax.process_index()
    count = min(_PARTS, jax.process_count(), len(paths))
    parts = [paths[process::count] for process in range(count)]
    # Processes that find other files have another key.
    key = f"{key}/{digest_of(list(paths))}"
    texts_by_path: dict[str, StoredText] = {}
    if here < len(parts):
        texts_by_path = {
            path: text
            for path, text in zip(parts[here], read_all(store, parts[here], read_text), strict=True)
            if not isinstance(text, SafetensorsError)
        }
        while len(_published) > 1:
            withdraw(_published.popleft())
        publish(f"{key}/{here}", encode(texts_by_path))
        _published.append(f"{key}/{here}")
    # Each begins with the part after its own, so that they do not all ask for the same.
    after = here % len(parts) + 1
    others = [process for process in (*range(after, len(parts)), *range(after)) if process != here]
    received = published([f"{key}/{process}" for process in others], _WAIT_SECONDS)
    for process in others:
        if (content := received.get(f"{key}/{process}")) is None:
            logger.debug("process %d has not sent its headers in time", process)
            continue
        with contextlib.suppress(ValueError):
            texts = decode(content)
            texts_by_path |= {path: texts[path] for path in parts[process] if path in texts}
    return texts_by_path
