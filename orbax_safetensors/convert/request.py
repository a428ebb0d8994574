"""The requests of `convert` and `reshard`. A request that is not valid cannot be built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.devices.partition import MeshLike, Partition, Spec, partition
from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.format.layout import MAX_FILE_BYTES
from orbax_safetensors.mapping.family import Family
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.paths import PathLike, check_one_store, place
from orbax_safetensors.streaming.casts import Casts
from orbax_safetensors.streaming.pipeline import check_memory, is_below


def location(argument: str, path: PathLike) -> str:
    """Return an absolute path, or a URL; raise `SafetensorsError` if an argument is neither."""
    if not isinstance(path, str | os.PathLike) or not os.fsdecode(path):
        raise SafetensorsError(f"{argument} is {path!r}, must be a path or a URL")
    return place(path)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments that `convert` and `reshard` share.

    Attributes:
      source, destination: absolute paths or URLs, see `location`.
      others: as the caller passes them. Arguments without a `repr` are not compared between processes.

    Raises `SafetensorsError` if arguments are not valid, or do not go together.
    """

    source: str
    destination: str
    mesh: MeshLike
    spec: Mapping[str, Spec] | None
    like: Any = field(repr=False)
    compression: bool
    memory_bytes: int
    options: SafetensorsOptions = field(repr=False)

    def __post_init__(self) -> None:
        check_memory(self.memory_bytes)

    @cached_property
    def partition(self) -> Partition | None:
        """The sharding of the arrays; None if the caller does not say."""
        if self.mesh is None and not self.spec and self.like is None:
            return None
        return partition(self.mesh, self.spec, self.like)

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """Options for the store of safetensors files, on either side."""
        return self.options.storage_options

    @property
    def source_options(self) -> Mapping[str, Any] | None:
        """Storage options with which the format of the source is detected."""
        return self.storage_options

    @property
    def facts(self) -> str:
        """The arguments that have to be alike in all processes, without a `Family`, whose `repr` differs."""
        compared = {argument.name: getattr(self, argument.name) for argument in fields(self) if argument.repr}
        text = repr({name: value for name, value in compared.items() if not isinstance(value, Family)})
        return text.replace("\n", " ")

    def step_directory(self, step: str) -> str:
        """Return the directory of `step` in the destination, a directory of steps."""
        return os.path.join(self.destination, step)

    def check_outside(self, source: str) -> None:
        """Raise `StorageError` if the destination is in the source."""
        if is_below(self.destination, source):
            raise StorageError(f"{self.destination}: is in the source, {source}")

    def _refuse(self, what: str, **arguments: Any) -> None:
        for argument, value in arguments.items():
            if value:
                raise SafetensorsError(f"{argument} is not for {what}")


@dataclass(frozen=True, kw_only=True)
class ConvertRequest(_Request):
    """The arguments of `convert`."""

    to: str
    family: FamilyLike
    variant: Mapping[str, Any] | None
    config: Any = field(repr=False)
    dtype: Any
    step: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to == "orbax":
            self._refuse("to='orbax'", config=self.config)
            if type(self.step) is not int or self.step < 0:
                raise SafetensorsError(f"step is {self.step!r}, must be an integer of at least 0")
        elif self.to == "safetensors":
            sharding = {"mesh": self.mesh, "spec": self.spec, "like": self.like}
            self._refuse("to='safetensors'", **sharding, step=self.step, compression=not self.compression)
            check_one_store(self.storage_options, self.destination, self.config)
        else:
            raise SafetensorsError(f"to is {self.to!r}, must be 'orbax' or 'safetensors'")
        _ = self.partition, self.casts

    @property
    def source_options(self) -> Mapping[str, Any] | None:
        """None for safetensors: Orbax reaches the source, with credentials of the environment."""
        return self.storage_options if self.to == "orbax" else None

    @cached_property
    def casts(self) -> Casts:
        """The dtypes that arrays are cast to."""
        return Casts(self.dtype)


@dataclass(frozen=True, kw_only=True)
class ReshardRequest(_Request):
    """The arguments of `reshard`. `check_for` refuses those that the format of the source has no use for."""

    max_file_bytes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.max_file_bytes) is not int or self.max_file_bytes < 1:
            raise SafetensorsError(f"max_file_bytes is {self.max_file_bytes!r}, must be an integer of at least 1")
        check_one_store(self.storage_options, self.source, self.destination)
        _ = self.partition

    def check_for(self, *, orbax: bool) -> None:
        """Raise `SafetensorsError` if an argument is not for the format of the source."""
        limits_files = self.max_file_bytes != MAX_FILE_BYTES
        if orbax:
            self._refuse("checkpoints of Orbax", max_file_bytes=limits_files)
            return
        self._refuse("safetensors", compression=not self.compression)
        if self.partition is not None:
            self._refuse("a mesh, whose devices have a file each", max_file_bytes=limits_files)
