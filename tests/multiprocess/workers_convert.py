"""What each process of `test_convert.py` runs: conversions that several share, one of which may fail."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

import orbax_safetensors as ost
from orbax_safetensors.streaming.partial_directory import PartialDirectory
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from tests.support.interrupted import CALLS

BOTH = ("to_orbax", "reshard_safetensors")


def run(root: str) -> dict[str, Any]:
    """What each of `FUNCTIONS` finds in its own directory, by name."""
    told = {}
    for function in FUNCTIONS:
        told[function.__name__] = function(str(Path(root) / function.__name__))
        multihost_utils.sync_global_devices(function.__name__)
    return told


def convert(root: str) -> dict[str, Any]:
    """Every conversion once: the bytes that this process wrote."""
    told = {}
    for kind, call in CALLS.items():
        source, destination = Path(root) / ("hf" if kind in BOTH else "from/0/items"), Path(root) / kind
        told[kind] = call(source, destination).nbytes
    return told


def fail(root: str) -> dict[str, Any]:
    """The last process cannot read; then all resume, and are told what was left."""
    told: dict[str, Any] = {}
    read = SafetensorsSource.read

    def failing(self: SafetensorsSource, tiles: Any, *report: Any) -> Any:
        if jax.process_index() == jax.process_count() - 1 and any(tile.name == "w9" for tile in tiles):
            raise ost.StorageError("the disk is gone")
        return read(self, tiles, *report)

    for kind in BOTH:
        source, destination = Path(root) / "hf", Path(root) / f"{kind} failing"
        SafetensorsSource.read = failing  # type: ignore[method-assign]
        try:
            CALLS[kind](source, destination)
        except ost.StorageError as error:
            told[kind] = [str(error)]
        SafetensorsSource.read = read  # type: ignore[method-assign]
        told[kind].append(CALLS[kind](source, destination, resume=True).nbytes)
    return told


def interrupted(root: str) -> dict[str, str]:
    """Ctrl-C in the last process, which Python raises there as it raises an error, but as no `Exception`."""
    told = {}

    def interrupt(done: int, total: int) -> None:
        if done and jax.process_index() == jax.process_count() - 1:
            raise KeyboardInterrupt

    for kind, call in CALLS.items():
        source = Path(root) / ("hf" if kind in BOTH else "from/0/items")
        try:
            call(source, Path(root) / kind, progress=interrupt)
        except (KeyboardInterrupt, ost.StorageError) as error:
            told[kind] = f"{type(error).__name__}: {error}"
    return told


def items(root: str) -> list[Any]:
    """A step of several items, which is stopped in the second one, and resumed; and an item on its own."""

    def stop(done: int, total: int) -> None:
        if done > total * 0.6:
            raise ost.StorageError("stopped")

    told: list[Any] = []
    source, destination = Path(root) / "from", Path(root) / "to"
    try:
        ost.reshard(source, destination, memory_bytes=40_000, progress=stop)
    except ost.StorageError as error:
        told += [str(error), destination.joinpath("7").exists()]
    told.append(ost.reshard(source, destination, memory_bytes=40_000, resume=True).nbytes)
    told.append(ost.reshard(source / "7" / "opt", Path(root) / "opt").nbytes)
    told.append(ost.reshard(Path(root) / "model", Path(root) / "anew").nbytes)
    return told


def sees_less(root: str) -> list[Any]:
    """The last process is not shown what the others have recorded; then it is, and all resume."""
    source, destination = Path(root) / "hf", Path(root) / "to"
    reshard, told = CALLS["reshard_safetensors"], []

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise ost.StorageError("stopped")

    done = PartialDirectory.done
    for arguments, shown in (
        ({"progress": stop}, done),
        ({"resume": True}, lambda directory: set()),
        ({"resume": True}, done),
    ):
        if jax.process_index() == jax.process_count() - 1:
            PartialDirectory.done = shown  # type: ignore[assignment, method-assign]
        try:
            told.append(reshard(source, destination, **arguments).nbytes)
        except ost.SafetensorsError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def cannot_flush(root: str) -> list[Any]:
    """One process cannot flush a file of tiles, or the first one the index; then all resume."""
    told: list[Any] = []
    fsync = os.fsync
    for name, process, suffix, number in (("tiles", 1, ".safetensors", 2), ("index", 0, ".index.json", 1)):
        source, destination = Path(root) / "hf", Path(root) / f"{name} failing"
        options: dict[str, int] = {"max_file_bytes": 30_000, "memory_bytes": 20_000}
        left = number if jax.process_index() == process else -1

        def failing(descriptor: int, suffix: str = suffix) -> None:
            nonlocal left
            left -= os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix)
            if not left:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(descriptor)

        os.fsync = failing
        try:
            ost.reshard(source, destination, **options)  # type: ignore[arg-type]
        except ost.StorageError as error:
            told.append([str(error), destination.exists()])
        finally:
            os.fsync = fsync
        told[-1].append(ost.reshard(source, destination, **options, resume=True).nbytes)  # type: ignore[arg-type]
    return told


def disagree(root: str) -> dict[str, str]:
    """One process has a source that is not there, a destination that is no path, or asks for something else, as a link.

    Or, with the same arguments, it sees other files.
    """
    told = {}
    last = jax.process_index() == jax.process_count() - 1
    for kind in BOTH:
        for name, source, no_path in (
            ("missing", "nothing" if last else "hf", False),
            ("other", "hf2" if last else "hf", False),
            ("no path", "hf", last),
        ):
            try:
                CALLS[kind](Path(root) / source, "gs:/to" if no_path else Path(root) / f"{kind} {name}")
            except ost.SafetensorsError as error:
                told[f"{kind} {name}"] = f"{type(error).__name__}: {error}"
        try:
            (ost.link if last else CALLS[kind])(Path(root) / "hf", Path(root) / f"{kind} link")
        except ost.SafetensorsError as error:
            told[f"{kind} link"] = f"{type(error).__name__}: {error}"
        with contextlib.chdir(Path(root) / "elsewhere" if last else root):
            try:
                CALLS[kind]("/proc/self/cwd/hf", Path(root) / f"{kind} files")
            except ost.SafetensorsError as error:
                told[f"{kind} files"] = f"{type(error).__name__}: {error}"
    return told


FUNCTIONS = (convert, fail, interrupted, items, sees_less, cannot_flush, disagree)
