"""`SafetensorsCheckpointer`: Orbax's checkpointer that also takes what Orbax does not, one file or a URL.

Orbax's checks are left out for URLs: they need a client library for each kind of store besides obstore, there is none
for `https://`, and on `gs://` they take files that Orbax has not written for unfinished checkpoints. A save writes the
same files there as Orbax does, so that Orbax, if it has such a client, takes it for one of its checkpoints.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from etils import epath

from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.handlers._compat import deserialize_step_metadata
from orbax_safetensors.handlers.checkpoint_handler import SafetensorsHandler, SafetensorsRestore, SafetensorsSave
from orbax_safetensors.mapping import Family
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE, STEP_FILE, step_record
from orbax_safetensors.save.write import read_beside, write_beside
from orbax_safetensors.storage.paths import as_text, is_url

_Args = TypeVar("_Args")


class SafetensorsCheckpointer(ocp.Checkpointer):
    """`ocp.Checkpointer(SafetensorsHandler())` that also takes the path of one file, and URLs.

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
        self._options = options or SafetensorsOptions()
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

        With `force`, all that is in `directory` is deleted once the tree has been checked; without it, a directory that
        exists is an error before anything is written. `metadata` returns `custom_metadata`.

        Raises:
          SafetensorsError: the tree or the metadata cannot be stored.
          StorageError: `directory` is a URL and holds something, or cannot be written.
          ValueError: `directory` is a path and exists.
        """
        if (url := _url(directory)) is None:
            if force and os.path.isdir(directory):  # which Orbax would delete before it looks at the tree
                self._handler.clear(directory, _as_args(SafetensorsSave, args, kwargs))
            super().save(directory, *args, force=force, custom_metadata=custom_metadata, **kwargs)
            return
        began = time.time_ns()
        self._step_file(began, custom_metadata)  # raises before anything is written
        self._handler.save(url, _as_args(SafetensorsSave, args, kwargs), existing="deleted" if force else "refused")
        finished = f"Checkpoint commit was successful to {url}"
        files = {STEP_FILE: self._step_file(began, custom_metadata), FINISHED_FILE: finished}
        write_beside(url, files, options=self._options, active=ActiveProcesses.of(self._processes))

    def restore(self, directory: epath.PathLike, *args: Any, **kwargs: Any) -> Any:
        """Restore a directory or one file, with the arguments of `SafetensorsRestore` or an instance of it."""
        if not _is_ours(directory):
            return super().restore(directory, *args, **kwargs)
        return self._handler.restore(
            _url(directory) or epath.Path(directory), _as_args(SafetensorsRestore, args, kwargs)
        )

    def metadata(self, directory: epath.PathLike) -> Any:
        """Return the metadata of a directory or one file, with the tensors in `item_metadata`."""
        url = _url(directory)
        # If this raised inside of Orbax, Orbax would go on without it.
        item_metadata = self._handler.metadata(url or epath.Path(directory))
        if not _is_ours(directory):
            return super().metadata(directory)
        text = None if url is None else read_beside(url, STEP_FILE, options=self._options)
        if text is None:
            return ocp.metadata.StepMetadata(item_metadata=item_metadata)
        try:
            return deserialize_step_metadata(json.loads(text), item_metadata=item_metadata)
        except (TypeError, ValueError, RecursionError) as error:
            raise StorageError(f"{url}: {STEP_FILE}: {error}") from error

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
            return arg
    return kind(*args, **kwargs)


def _url(path: epath.PathLike) -> str | None:
    """Return a path that is a URL as text, the same for `epath.Path` and `str`; None for any other path."""
    text = as_text(path)
    return text if is_url(text) else None


def _is_ours(path: epath.PathLike) -> bool:
    """Return whether Orbax refuses a path: a file, which it takes for an unfinished checkpoint, or a URL."""
    return _url(path) is not None or os.path.isfile(os.fspath(path))
