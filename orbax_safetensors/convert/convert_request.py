"""The requests of `convert` and `reshard`. A request that is not valid cannot be built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.devices.casts import Casts
from orbax_safetensors.devices.partition import MeshLike, Partition, Spec, partition
from orbax_safetensors.errors import SafetensorsError, StorageError, UnusedArgumentError
from orbax_safetensors.format.layout import MAX_FILE_BYTES
from orbax_safetensors.mapping.family import Family
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.paths import PathLike, absolute_path, check_one_store, is_below
from orbax_safetensors.streaming.cutting import MEMORY_BYTES, check_memory

# The values of `to`, and for each the arguments of `convert` that no other takes.
FORMATS = {"orbax": ("mesh", "spec", "like", "step", "compression"), "safetensors": ("config",)}


@dataclass(frozen=True, kw_only=True)
class _ConversionArguments:
    """The arguments that `convert` and `reshard` share.

    Attributes:
      source, destination: absolute paths or URLs.
      others: as the caller passes them. Arguments without a `repr` are not compared between processes.

    Raises `SafetensorsError` if arguments are not valid, or do not go together.
    """

    source: str
    destination: str
    mesh: MeshLike = None
    spec: Mapping[str, Spec] | None = None
    like: Any = field(default=None, repr=False)
    compression: bool = True
    memory_bytes: int = MEMORY_BYTES
    options: SafetensorsOptions = field(default_factory=SafetensorsOptions, repr=False)

    @classmethod
    def of(
        cls, source: PathLike, destination: PathLike, *, options: SafetensorsOptions | None = None, **arguments: Any
    ) -> Self:
        """Return the request that a caller means; raises `SafetensorsError` if a place is neither a path nor a URL."""
        return cls(
            source=_location("source", source),
            destination=_location("destination", destination),
            options=SafetensorsOptions.of(options),
            **arguments,
        )

    def __post_init__(self) -> None:
        check_memory(self.memory_bytes)

    @cached_property
    def partition(self) -> Partition | None:
        """The sharding of the arrays; None if the caller does not say."""
        if self.mesh is None and not self.spec and self.like is None:
            return None
        return partition(self.mesh, self.spec, self.like)

    @property
    def facts(self) -> str:
        """The arguments that have to be alike in all processes, without a `Family`, whose `repr` differs."""
        compared = {argument.name: getattr(self, argument.name) for argument in fields(self) if argument.repr}
        text = repr({name: value for name, value in compared.items() if not isinstance(value, Family)})
        return text.replace("\n", " ")

    def check_outside(self, source: str) -> None:
        """Raise `StorageError` if the destination is in the source."""
        if is_below(self.destination, source):
            raise StorageError(f"{self.destination}: is in the source, {source}")

    def _refuse(self, what: str, **arguments: Any) -> None:
        for argument, value in arguments.items():
            if value:
                raise UnusedArgumentError(f"{argument} is not for {what}")


@dataclass(frozen=True, kw_only=True)
class ConvertRequest(_ConversionArguments):
    """The arguments of `convert`."""

    to: str
    family: FamilyLike = None
    variant: Mapping[str, Any] | None = None
    config: Any = field(default=None, repr=False)
    dtype: Any = None
    step: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to not in FORMATS:
            raise SafetensorsError(f"to is {self.to!r}, must be {' or '.join(map(repr, FORMATS))}")
        given = vars(self) | {"compression": not self.compression}
        for other in FORMATS.keys() - {self.to}:
            self._refuse(f"to={self.to!r}", **{argument: given[argument] for argument in FORMATS[other]})
        if type(self.step) is not int or self.step < 0:
            raise SafetensorsError(f"step is {self.step!r}, must be an integer of at least 0")
        check_one_store(self.options.storage_options, self.destination, self.config)
        _ = self.partition, self.casts

    @cached_property
    def casts(self) -> Casts:
        """The dtypes that arrays are cast to."""
        return Casts(self.dtype)


@dataclass(frozen=True, kw_only=True)
class ReshardRequest(_ConversionArguments):
    """The arguments of `reshard`. `check_for` refuses those that the format of the source has no use for."""

    max_file_bytes: int = MAX_FILE_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.max_file_bytes) is not int or self.max_file_bytes < 1:
            raise SafetensorsError(f"max_file_bytes is {self.max_file_bytes!r}, must be an integer of at least 1")
        check_one_store(self.options.storage_options, self.source, self.destination)
        _ = self.partition

    def check_for(self, *, orbax: bool) -> None:
        """Raise `UnusedArgumentError` if an argument is not for the format of the source."""
        limits_files = self.max_file_bytes != MAX_FILE_BYTES
        if orbax:
            self._refuse("checkpoints of Orbax", max_file_bytes=limits_files)
            return
        self._refuse("safetensors", compression=not self.compression)
        if self.partition is not None:
            self._refuse("a mesh, whose devices have a file each", max_file_bytes=limits_files)


def _location(argument: str, path: PathLike) -> str:
    if not isinstance(path, str | os.PathLike) or not os.fsdecode(path):
        raise SafetensorsError(f"{argument} is {path!r}, must be a path or a URL")
    return absolute_path(path)
