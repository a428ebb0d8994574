"""`SafetensorsCheckpointer`: Orbax's checkpointer that also takes what Orbax does not, one file or a URL.

Orbax's checks are left out for URLs: they need a client library for each kind of store besides obstore, there is none
for `https://`, and on `gs://` they take files that Orbax has not written for unfinished checkpoints. A save writes the
same files there as Orbax does, so that Orbax, if it has such a client, takes it for one of its checkpoints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from etils import epath

from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import new_key, reaching_others, same_arguments, together
from orbax_safetensors.errors import SafetensorsError, storage_errors
from orbax_safetensors.format import strict_json
from orbax_safetensors.handlers._compat import deserialize_step_metadata
from orbax_safetensors.handlers.checkpoint_handler import (
    SafetensorsHandler,
    SafetensorsRestore,
    SafetensorsSave,
    checked,
)
from orbax_safetensors.handlers.sidecar_files import read_sidecar_file, write_sidecar_files
from orbax_safetensors.mapping import Family
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE, STEP_FILE
from orbax_safetensors.orbax_store.metadata import finished_text, step_record
from orbax_safetensors.save.new_directory import NewDirectory
from orbax_safetensors.storage.paths import absolute_path, is_url
from orbax_safetensors.storage.replace import recover
from orbax_safetensors.storage.threads import refusals

_Args = TypeVar("_Args")


class SafetensorsCheckpointer(ocp.Checkpointer):
    """`ocp.Checkpointer(SafetensorsHandler())` that also takes the path of one file, and URLs.

    ```python
    params = ost.SafetensorsCheckpointer().restore("/models/mlp/model.safetensors")
    ```

    On `gs://`, `s3://`, `az://` and the other stores that `open_checkpoint` takes, any directory of `.safetensors`
    files is a checkpoint, whoever has written it.
    """

    _handler: SafetensorsHandler

    def __init__(
        self,
        *,
        family: Family | str | None = None,
        variant: Mapping[str, Any] | None = None,
        options: SafetensorsOptions | None = None,
        multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the handler with the arguments that it takes; other keywords are those of `ocp.Checkpointer`."""
        self._options = SafetensorsOptions.of(options)
        self._processes = multiprocessing_options or ocp.options.MultiprocessingOptions()
        handler = SafetensorsHandler(
            family=family, variant=variant, options=self._options, multiprocessing_options=self._processes
        )
        super().__init__(handler, multiprocessing_options=self._processes, **kwargs)

    def save(
        self,
        directory: epath.PathLike,
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save with the arguments of `SafetensorsSave` or an instance of it. Every process calls this.

        With `force`, the new checkpoint takes the place of all that is in `directory`, a checkpoint or an empty
        directory, once it is complete and on the disk; without it, a directory that exists is an error before anything
        is written. A save that fails leaves `directory` as it was, and nothing beside it. `metadata` returns
        `custom_metadata`.

        Raises:
          SafetensorsError: the tree or the metadata cannot be stored.
          StorageError: `directory` exists, or is a URL and holds something, or cannot be written or replaced.
        """
        directory = absolute_path(directory)
        save_args = _as_args(SafetensorsSave, args, kwargs)
        active = ActiveProcesses.of(self._processes)
        if not is_url(directory):
            self._save_to_path(directory, save_args, active, force=force, custom_metadata=custom_metadata)
            return
        began = time.time_ns()
        self._step_file(began, custom_metadata)  # raises before anything is written
        self._handler.save(directory, save_args, existing="replaced" if force else "refused")
        files = {STEP_FILE: self._step_file(began, custom_metadata), FINISHED_FILE: finished_text(directory)}
        write_sidecar_files(directory, files, options=self._options, active=active)

    def _save_to_path(
        self, path: str, args: Any, active: ActiveProcesses, *, force: bool, custom_metadata: dict[str, Any] | None
    ) -> None:
        """Let Orbax save, and put the checkpoint in its place; all processes do so together."""
        new = NewDirectory(os.path.realpath(path), force=force, config=args.config, like=args.like)
        key = new_key("directory", path, active)
        try:
            together(
                f"{key}/begun",  # before Orbax waits for the others, without a bound
                active.by_primary(partial(new.begin, resume=False)),
                f"force={force}",
                check=same_arguments,
                active=active,
                timeout_secs=self._options.join_timeout_secs,
            )
            with (
                reaching_others(active),
                refusals(),
                storage_errors(f"{path}: cannot be saved", OSError),
            ):
                super().save(epath.Path(new.path), args=args, force=force, custom_metadata=custom_metadata)
            together(f"{key}/finished", active.by_primary(new.finish), active=active)
        finally:
            new.release()

    def restore(self, directory: epath.PathLike, *args: Any, **kwargs: Any) -> Any:
        """Restore a directory or one file, with the arguments of `SafetensorsRestore` or an instance of it."""
        directory = absolute_path(directory)
        if not _is_ours(directory):
            recover(directory)
            return super().restore(directory, *args, **kwargs)
        return self._handler.restore(directory, _as_args(SafetensorsRestore, args, kwargs))

    def metadata(self, directory: epath.PathLike) -> Any:
        """Return the metadata of a directory or one file, with the tensors in `item_metadata`."""
        directory = absolute_path(directory)
        # If this raised inside of Orbax, Orbax would go on without it.
        item_metadata = self._handler.metadata(directory)
        # Read here in any case, because Orbax would wait for the writer of a pipe.
        text = read_sidecar_file(directory, STEP_FILE, options=self._options)
        if not _is_ours(directory):
            return super().metadata(directory)
        if text is None:
            return ocp.metadata.StepMetadata(item_metadata=item_metadata)
        with storage_errors(f"{directory}: {STEP_FILE}"):
            return deserialize_step_metadata(strict_json.loads(text), item_metadata=item_metadata)

    def _step_file(self, began: int, custom_metadata: dict[str, Any] | None) -> str:
        """Return the record of a step that is finished now; raises `SafetensorsError` if Orbax cannot record it."""
        try:
            return step_record(self._handler.typestr(), custom_metadata, began)
        except (TypeError, ValueError) as error:
            raise SafetensorsError(f"custom_metadata: {error}") from error


def _as_args(kind: type[_Args], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments of a handler as `ocp.Checkpointer` takes them: one by one, or an instance of `kind`."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, ocp.args.CheckpointArgs):
            return checked(arg, kind)
    return kind(*args, **kwargs)


def _is_ours(path: str) -> bool:
    """Return whether Orbax refuses a path: a file, which it takes for an unfinished checkpoint, or a URL."""
    return is_url(path) or os.path.isfile(path)
