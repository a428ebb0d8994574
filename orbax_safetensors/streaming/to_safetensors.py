"""From any source of tiles into a directory of safetensors files."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

import jax

from orbax_safetensors.cost.conversion import ConversionCost, ConversionPlan
from orbax_safetensors.devices.agreement import agree, all_gather, forget, new_key, together
from orbax_safetensors.errors import StorageError
from orbax_safetensors.geometry.tiling import storage_order
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.streaming.bundles import bundles
from orbax_safetensors.streaming.draft import Draft
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.model_files import ModelFiles
from orbax_safetensors.streaming.pipeline import (
    Bundle,
    Moved,
    Progress,
    TileSource,
    batch_bytes,
    is_below,
    nbytes,
    planned,
    share,
    stream,
)
from orbax_safetensors.streaming.safetensors_sink import SafetensorsSink


class ToSafetensors:
    """All leaves of a source become files in a directory; see `Work`."""

    def __init__(
        self,
        source: TileSource,
        destination: str,
        files: Files,
        model_files: ModelFiles,
        groups: Iterable[tuple[str, ...]],
        memory_bytes: int,
    ) -> None:
        """Decides on tiles. Leaves are those of `files`; `groups` are leaves that interleave in these.

        Raises `SafetensorsError` where memory does not suffice.
        """
        self.source, self._destination, self._files, self._model_files = source, destination, files, model_files
        self._memory_bytes = memory_bytes
        self._limit = batch_bytes(memory_bytes)
        grains = {name: (1,) * len(fact.shape) for name, fact in source.leaves.items()}
        orders = {name: storage_order(files.views[name]) for name in source.leaves}
        self._cuts = bundles(source, grains, orders, groups, memory_bytes)
        tiles = (tile for bundle in self._cuts for tile in bundle)
        self._numbers = {tile: number for number, tile in enumerate(tiles)}

    def _share(self, cuts: Sequence[Bundle], process: int, count: int) -> list[Bundle]:
        return share(cuts, lambda bundle: nbytes(bundle, self.source.leaves), process, count)

    def _check_outside(self, draft: Draft) -> None:
        if is_below(self.source.path, draft.path):
            raise StorageError(
                f"{self.source.path}: is in {draft.path}, which is what becomes {self._destination}; move it away"
            )

    def _sink(self, draft: Draft) -> SafetensorsSink:
        return SafetensorsSink(draft, self._files, self._numbers, LocalStore(), self._memory_bytes)

    def plan(self, process_count: int) -> ConversionPlan:
        """See `Work`."""
        draft = Draft(self._destination, "", "")
        self._check_outside(draft)
        draft.check_place()
        sink = self._sink(draft)
        return ConversionPlan(
            self._destination,
            tuple(
                ConversionCost(planned(self.source, sink, self._share(self._cuts, process, process_count), self._limit))
                for process in range(process_count)
            ),
            files=self._files.planned,
            arrays=(),
            source_bytes=self.source.stored_bytes,
            from_orbax=self.source.decoded,
        )

    def run(self, *, resume: bool, progress: Progress | None) -> Moved:
        """See `Work`."""
        source, numbers = self.source, self._numbers
        told = digest(source, self._files, self._model_files, self._cuts)
        key = new_key("convert", self._destination)
        process = jax.process_index()
        primary = process == 0
        run = all_gather(f"{key}/run", secrets.token_hex(8))[0]
        with Draft(self._destination, told, run) as draft:

            def begin() -> None:
                self._check_outside(draft)
                if primary:
                    draft.begin(resume=resume)

            together(f"{key}/begin", begin, told)
            together(f"{key}/open", lambda: draft.open(process))
            done = together(f"{key}/done", draft.done)
            # Shares follow from it. A network file system may show a process less, and then nobody would move some
            # tiles.
            agree(f"{key}/seen", None, hashlib.sha256(repr(sorted(done)).encode()).hexdigest())
            left = [bundle for bundle in self._cuts if not all(numbers[tile] in done for tile in bundle)]
            own = self._share(left, process, jax.process_count())
            sink = self._sink(draft)

            def write() -> None:
                try:
                    stream(source, sink, own, self._limit, progress)
                finally:
                    sink.close()
                source.check()

            def finish() -> None:
                if primary:
                    draft.check_complete(len(numbers))
                    sink.finish(self._model_files)

            together(f"{key}/tiles", write)
            together(f"{key}/finish", finish)
        for part in ("run", "begin", "open", "done", "seen", "tiles"):
            forget(f"{key}/{part}")
        return Moved(self._destination, sink.nbytes, source.requests + sink.requests)


def digest(source: TileSource, files: Files, model_files: ModelFiles, cuts: Sequence[Bundle]) -> str:
    """Equal where the same tiles of the same source go to the same places."""
    views = sorted(files.views.items())
    hashed = hashlib.sha256(f"{source.identity}\0{model_files}\0{views}\0".encode("utf-8", "backslashreplace"))
    for name, header in files.layout.files:
        hashed.update(f"{name}\0".encode())
        hashed.update(header.encode())
    for bundle in cuts:
        hashed.update(repr([tuple(tile) for tile in bundle]).encode("utf-8", "backslashreplace"))
    return hashed.hexdigest()
