"""The request of `link`. A request that is not valid cannot be built."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypedDict

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.devices.partition import MeshLike, Partition, Spec, partition
from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.orbax_store.directories import absolute, check_literal, is_on_gcs
from orbax_safetensors.storage.paths import PathLike, absolute_path, is_url, shown
from orbax_safetensors.streaming.cutting import MEMORY_BYTES, check_memory

CHUNK_BYTES = 16 * 2**20
# The smallest valid `chunk_bytes`: each chunk costs an entry of the index, and a request.
_LEAST_CHUNK_BYTES = 2**16
# The Hugging Face Hub's cache: the files of a snapshot belong to the Hub's library.
_SNAPSHOT = re.compile(r".*/models--[^/]+/snapshots/[^/]+")


class LinkArguments(TypedDict, total=False):
    """The arguments of `link` that also say what `plan_link` plans."""

    family: FamilyLike
    variant: Mapping[str, Any] | None
    mesh: MeshLike
    spec: Mapping[str, Spec] | None
    like: Any
    chunk_bytes: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class LinkRequest:
    """The arguments of `link`.

    Attributes:
      source, destination: absolute paths, or URLs. `destination` is a directory; below `gs://` that of the source.
      new_step: whether the directory above the link becomes a step of Orbax if it can be one.
      others: as the caller passes them.

    Raises `StorageError` for a place that a link cannot have, and `SafetensorsError` for a number out of range.
    """

    source: str
    destination: str
    new_step: bool
    family: FamilyLike = None
    variant: Mapping[str, Any] | None = None
    mesh: MeshLike = None
    spec: Mapping[str, Spec] | None = None
    like: Any = None
    chunk_bytes: int = CHUNK_BYTES
    memory_bytes: int = MEMORY_BYTES
    hard_links: bool = False

    @classmethod
    def of(cls, source: PathLike, destination: PathLike | None, **arguments: Any) -> Self:
        """Return the request that a caller means. By default, a link lies beside the files.

        Without a destination, the directory above the files need not be a step.
        """
        path = _absolute(source)
        directory = _directory(path) if destination is None else _absolute(destination)
        return cls(source=path, destination=directory, new_step=destination is not None, **arguments)

    def __post_init__(self) -> None:
        _ = self.partition
        for path in (self.source, self.destination):
            if is_url(path) and not (is_on_gcs(path) and self.in_source):
                raise StorageError(
                    f"{shown(path)}: a link is between files of one file system, or lies beside the objects of a gs:// "
                    "directory; download the files first, or restore from the URL, which needs no link"
                )
        check_literal(self.destination)
        check_memory(self.memory_bytes)
        if type(self.chunk_bytes) is not int or self.chunk_bytes < _LEAST_CHUNK_BYTES:
            raise SafetensorsError(
                f"chunk_bytes is {self.chunk_bytes!r}, must be an integer of at least {_LEAST_CHUNK_BYTES}"
            )
        if self.in_source and _SNAPSHOT.fullmatch(os.path.realpath(self.destination)):
            raise StorageError(
                f"{self.destination}: is a snapshot in the Hub's cache, where nothing may be added; pass a destination"
            )

    @cached_property
    def partition(self) -> Partition:
        """The sharding of the arrays."""
        return partition(self.mesh, self.spec, self.like)

    @property
    def facts(self) -> tuple[Any, ...]:
        """The arguments that identify the link: equal in all processes, and in a run that resumes it."""
        numbers = (self.chunk_bytes, self.memory_bytes, self.hard_links)
        return self.source, self.destination, self.variant, self.partition, *numbers

    @property
    def directory(self) -> str:
        """The directory of the source's files."""
        return _directory(self.source)

    @property
    def in_source(self) -> bool:
        """Whether the index is to lie beside the files."""
        return self.destination == self.directory


def _absolute(path: PathLike) -> str:
    """Return an absolute path, or a URL; those of other places than a `gs://` directory stay as they are."""
    text = absolute_path(path)
    return absolute(text) if is_on_gcs(text) else text


def _directory(path: str) -> str:
    return os.path.dirname(path) if os.path.isfile(path) else path
