"""From any source of tiles into a directory of safetensors files."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence

import jax

from orbax_safetensors.errors import StorageError
from orbax_safetensors.io.local import LocalStore
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.plan.tiling import storage_order
from orbax_safetensors.processes import agree, exchange, forget, new_key, together
from orbax_safetensors.streaming.beside import Beside
from orbax_safetensors.streaming.cutting import bundles
from orbax_safetensors.streaming.draft import Draft
from orbax_safetensors.streaming.layouts import Files
from orbax_safetensors.streaming.pipeline import (
    Bundle,
    Moved,
    Progress,
    TileSource,
    batch_bytes,
    is_below,
    nbytes,
    share,
    stream,
)
from orbax_safetensors.streaming.safetensors_sink import SafetensorsSink


def write_safetensors(
    source: TileSource,
    destination: str,
    files: Files,
    beside: Beside,
    groups: Iterable[tuple[str, ...]],
    options: SafetensorsOptions,
    *,
    memory_bytes: int,
    resume: bool,
    progress: Progress | None,
) -> Moved:
    """Writes all leaves of `source`, which are those of `files`, together with all other processes.

    `groups` are leaves that interleave in the files. Raises `StorageError` or `TensorMismatchError` in every process
    where one fails; what has been written stays in `<destination>.partial`, for a run that resumes.
    """
    limit = batch_bytes(memory_bytes)
    grains = {name: (1,) * len(fact.shape) for name, fact in source.leaves.items()}
    orders = {name: storage_order(files.views[name]) for name in source.leaves}
    cuts = bundles(source, grains, orders, groups, limit)
    numbers = {tile: number for number, tile in enumerate(tile for bundle in cuts for tile in bundle)}
    told = digest(source, files, beside, cuts)
    key = new_key(f"convert/{hashlib.sha256(os.fsencode(destination)).hexdigest()}")
    process = jax.process_index()
    primary = process == 0
    run = exchange(f"{key}/run", secrets.token_hex(8))[0]
    with Draft(destination, told, run) as draft:

        def begin() -> None:
            if is_below(source.path, draft.path):
                raise StorageError(
                    f"{source.path}: is in {draft.path}, which is what becomes {destination}; move it away"
                )
            if primary:
                draft.begin(resume=resume)

        together(f"{key}/begin", begin, told)
        together(f"{key}/open", lambda: draft.open(process))
        done = together(f"{key}/done", draft.done)
        # Shares follow from it. A network file system may show a process less, and then nobody would move some tiles.
        agree(f"{key}/seen", None, hashlib.sha256(repr(sorted(done)).encode()).hexdigest())
        left = [bundle for bundle in cuts if not all(numbers[tile] in done for tile in bundle)]
        own = share(left, lambda bundle: nbytes(bundle, source.leaves), process, jax.process_count())
        sink = SafetensorsSink(draft, files, numbers, LocalStore(), options)

        def write() -> int:
            try:
                moved = stream(source, sink, own, limit, progress)
            finally:
                sink.close()
            source.check()
            return moved

        def finish() -> None:
            if primary:
                draft.check_complete(len(numbers))
                sink.finish(beside)

        moved = together(f"{key}/tiles", write)
        together(f"{key}/finish", finish)
    for part in ("run", "begin", "open", "done", "seen", "tiles"):
        forget(f"{key}/{part}")
    return Moved(destination, moved, source.requests + sink.requests)


def digest(source: TileSource, files: Files, beside: Beside, cuts: Sequence[Bundle]) -> str:
    """Equal where the same tiles of the same source go to the same places."""
    views = sorted(files.views.items())
    hashed = hashlib.sha256(f"{source.identity}\0{beside}\0{views}\0".encode("utf-8", "backslashreplace"))
    for name, header in files.layout.files:
        hashed.update(f"{name}\0".encode())
        hashed.update(header.encode())
    for bundle in cuts:
        hashed.update(repr([tuple(tile) for tile in bundle]).encode("utf-8", "backslashreplace"))
    return hashed.hexdigest()
