"""The request of a save: what its caller wants, whichever of the ways to save that is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.format.layout import MAX_FILE_BYTES
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.paths import PathLike, absolute_path, as_text, check_one_store, is_below

# What happens to files that are already there: "kept", but files of a checkpoint are an error; "refused": any file is
# an error; "replaced", with all that is below the directory on an object store, once the new files are there.
Existing = Literal["kept", "refused", "replaced"]

# What happens to tensors of `like` for which the tree has no leaf.
Rest = Literal["copy", "leave"]


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of a save, in the directory `path`, which is the same in every process and need not exist yet.

    Attributes:
      item, save_args, metadata, max_file_bytes, family, variant, config, like, rest, dtype: as for `SafetensorsSave`.
      index: True for an index or an error, None for an index if one is possible, False for none.
      zarr3: whether the index describes arrays in version 3 of Zarr.
      whole_tree: whether the index holds the tree; otherwise Orbax itself writes the tree.
      existing: what happens to files that are already there.
      active: the processes that save together.
    """

    path: PathLike
    item: Any = field(repr=False)
    save_args: Any = field(default=None, repr=False)
    metadata: Mapping[str, str] | None = None
    max_file_bytes: int = MAX_FILE_BYTES
    family: FamilyLike = None
    variant: Mapping[str, Any] | None = None
    config: Any = None
    like: PathLike | None = None
    rest: Rest = "copy"
    dtype: Any = None
    index: bool | None = False
    zarr3: bool = True
    whole_tree: bool = True
    existing: Existing = "kept"
    active: ActiveProcesses = field(default_factory=ActiveProcesses.all)
    options: SafetensorsOptions = field(default_factory=SafetensorsOptions)

    def check(self) -> None:
        """Raise `SafetensorsError` if arguments are not valid, or do not go together.

        Not when the request is made: processes that save together have to fail together.
        """
        if self.existing == "replaced":
            check_kept(as_text(self.path), config=self.config, like=self.like)
        if not isinstance(self.max_file_bytes, int) or self.max_file_bytes < 1:
            raise SafetensorsError(f"max_file_bytes is {self.max_file_bytes!r}, must be an integer of at least 1")
        if not isinstance(self.metadata, Mapping | None):
            raise SafetensorsError(f"metadata is {self.metadata!r:.80}, must be a dict of strings")
        if self.rest not in ("copy", "leave"):
            raise SafetensorsError(f"rest is {self.rest!r}, must be 'copy' or 'leave'")
        check_one_store(self.options.storage_options, self.path, self.config, self.like)


def check_kept(directory: str, *, config: Any, like: Any) -> None:
    """Raise `StorageError` if a save that replaces `directory` reads `config` or `like`, as far as these are paths."""
    for argument, source in (("config", config), ("like", like)):
        if not isinstance(source, str | os.PathLike) or not is_below(path := absolute_path(source), directory):
            continue
        if is_below(directory, path):
            raise StorageError(f"{source}: {argument}= is the checkpoint that this save replaces; save elsewhere")
        raise StorageError(f"{source}: is in {directory}, which the save would delete; save elsewhere")
