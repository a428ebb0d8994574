"""`safetensors.headers.json.gz`: what the headers of a directory and its index say, to be read in one request.

What writes a checkpoint into an object store writes the record last. A text of it stands for its file as long as the
listing of the directory has the file in the recorded state. Otherwise, or if anything is wrong with the record, the
file itself is read: a record saves requests, and nothing depends on it.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterable, Mapping

from orbax_safetensors.checkpoint.header_texts import MAX_BYTES, StoredText, decode, encode, read_all, read_text
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.format.index import INDEX_SUFFIX
from orbax_safetensors.storage.store import Stamp, Store, read_small, write_small

logger = logging.getLogger(__name__)

HEADERS_NAME = "safetensors.headers.json.gz"


def recorded_texts(store: Store, directory: str, states: Mapping[str, Stamp | None]) -> dict[str, StoredText]:
    """Return the recorded texts of the files that are still as they were, by name; none if there is no valid record.

    `states` are those of the directory's listing.
    """
    if (state := states.get(HEADERS_NAME)) is None:
        return {}
    path = posixpath.join(directory, HEADERS_NAME)
    try:
        # The answer has to be in the state that the listing has: later reads of the files compare their answers so.
        texts = decode(read_small(store.open(path, state), MAX_BYTES))
    except (SafetensorsError, ValueError) as error:
        logger.debug("%s: is not used, and the headers are read: %s", path, error)
        return {}
    current = {name: text for name, text in texts.items() if is_exact(text.stamp) and states.get(name) == text.stamp}
    if len(current) < len(texts):
        logger.debug("%s: %d of %d files have changed since", path, len(texts) - len(current), len(texts))
    return current


def is_exact(stamp: Stamp) -> bool:
    """Return whether only one content has this state: by a strong ETag, not by a date."""
    return stamp.version.startswith('"')


def write_header_record(store: Store, directory: str, names: Iterable[str]) -> None:
    """Record the headers of files in a directory, and the indexes beside them, if it is on an object store.

    Reads them, as another program may have replaced a file that this one has written. Writes no record if that fails,
    or if the listing has other states.
    """
    if store.is_local:
        return
    path = posixpath.join(directory, HEADERS_NAME)
    try:
        states = store.states(directory) or {}
        names = [*names, *(name for name in states if name.endswith(INDEX_SUFFIX))]
        read = read_all(store, [posixpath.join(directory, name) for name in names], read_text)
        texts: dict[str, StoredText] = {}
        for name, text in zip(names, read, strict=True):
            if isinstance(text, SafetensorsError):
                raise text
            if not is_exact(text.stamp) or text.stamp != states.get(name):
                logger.debug("%s: is not written: %s is listed in another state than it is sent", path, name)
                return
            texts[name] = text
        content = encode(texts)
        decode(content)  # what is too long to be read is not worth a request of every load
        write_small(store, path, content)
    except (SafetensorsError, ValueError) as error:
        logger.warning("%s: is not written, so that each load reads all headers: %s", path, error)
