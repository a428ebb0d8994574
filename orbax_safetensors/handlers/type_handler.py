"""`SafetensorsTypeHandler`: array leaves of a PyTree checkpoint as safetensors, beside Orbax's own metadata."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.handlers.sidecar_files import read_sidecar_file
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store.shardings import SHARDING_FILE, parse_shardings
from orbax_safetensors.restore.request import RestoreRequest
from orbax_safetensors.restore.run import restore
from orbax_safetensors.save.job import prepare
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.storage.paths import as_text


class SafetensorsTypeHandler(ocp.type_handlers.TypeHandler):
    """Save and restore `jax.Array` leaves as safetensors files, planned over all leaves of a tree at once.

    ```python
    registry = ocp.type_handlers.create_type_handler_registry(
        (int, ocp.type_handlers.ScalarHandler()), (jax.Array, ost.SafetensorsTypeHandler())
    )
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))
    checkpointer.save("/models/tree", {"params": {"w": jnp.ones((64, 512))}, "step": 7})
    ```

    For the registry of an `ocp.PyTreeCheckpointHandler`, in the place of Orbax's handler of `jax.Array`. Leaves of
    other types are Orbax's. A handler with the same registry restores what was saved, and after `register()` any does.
    """

    # Orbax looks in its handler of arrays for a store of Zarr chunk shapes, which safetensors do not have.
    _array_metadata_store = None

    def __init__(
        self,
        *,
        options: SafetensorsOptions | None = None,
        multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
    ) -> None:
        """Take `options`, which say how bytes are moved, and `multiprocessing_options`, as `SafetensorsHandler`."""
        self._options = SafetensorsOptions.of(options)
        self._multiprocessing_options = multiprocessing_options or ocp.options.MultiprocessingOptions()

    def typestr(self) -> str:
        """Return the name of `jax.Array`: a leaf's type is the same wherever its bytes are."""
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[ocp.metadata.ArrayMetadata]:
        """Return shape and dtype of each leaf, and its sharding if that was recorded."""
        return await asyncio.to_thread(self._metadata, infos)

    def _metadata(self, infos: Sequence[Any]) -> list[ocp.metadata.ArrayMetadata]:
        directories = dict.fromkeys(info.parent_dir for info in infos)
        checkpoints = {at: read_checkpoint(at, self._options.storage_options) for at in directories}
        shardings = {at: self._shardings(at) for at in directories}
        return [
            ocp.metadata.ArrayMetadata(
                name=info.name,
                directory=info.parent_dir,
                shape=checkpoints[info.parent_dir][info.name].shape,
                sharding=shardings[info.parent_dir].get(info.name),
                dtype=checkpoints[info.parent_dir][info.name].dtype,
            )
            for info in infos
        ]

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[ocp.Future]:
        """Start to save all leaves, and return once the shards are in host memory, where they stay as they are."""
        (directory,) = {info.parent_dir for info in infos}
        names = [info.name for info in infos]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise TensorMismatchError(f"two leaves of the tree have the name {twice!r}")
        save_args = dict(zip(names, args, strict=True)) if args is not None else None
        request = SaveRequest(
            directory,
            dict(zip(names, values, strict=True)),
            save_args,
            index=None if infos[0].is_ocdbt_checkpoint else False,
            zarr3=bool(infos[0].use_zarr3),
            whole_tree=False,
            active=ActiveProcesses.of(self._multiprocessing_options),
            options=self._bounded(infos),
        )
        job = prepare(request).kept()

        async def commit() -> None:
            job.run()

        return [ocp.future.CommitFutureAwaitingContractedSignals(commit(), name="safetensors_type_handler")]

    async def deserialize(self, infos: Sequence[Any], args: Sequence[ocp.RestoreArgs] | None = None) -> Sequence[Any]:
        """Restore all leaves in one plan. A leaf without a sharding gets the recorded one, if there is one."""
        if args is None:
            args = [ocp.ArrayRestoreArgs()] * len(infos)
        return await asyncio.to_thread(self._deserialize, infos, args)

    def _deserialize(self, infos: Sequence[Any], args: Sequence[ocp.RestoreArgs]) -> list[Any]:
        leaves: dict[tuple[Any, str], Any] = {}
        for directory in dict.fromkeys(info.parent_dir for info in infos):
            shardings = self._shardings(directory)
            wanted = {
                info.name: _as_array(arg, shardings.get(info.name))
                for info, arg in zip(infos, args, strict=True)
                if info.parent_dir == directory
            }
            request = RestoreRequest(
                path=as_text(directory), restore_args=wanted, by_name=True, options=self._bounded(infos)
            )
            restored = restore(request)
            leaves |= {(directory, name): leaf for name, leaf in restored.items()}
        return [leaves[info.parent_dir, info.name] for info in infos]

    def _shardings(self, directory: Any) -> dict[str, ocp.metadata.ShardingMetadata]:
        """Return the recorded shardings of the leaves in a directory."""
        content = read_sidecar_file(directory, SHARDING_FILE, options=self._options)
        return parse_shardings(content, str(directory))

    def _bounded(self, infos: Sequence[Any]) -> SafetensorsOptions:
        """Return the options with no more bytes in flight than `save_concurrent_gb` or `restore_concurrent_gb`."""
        budget = self._options.in_flight_bytes
        limit = getattr(infos[0].byte_limiter, "max_bytes", budget)  # leaves share a limiter, which may have no limit
        return dataclasses.replace(self._options, in_flight_bytes=max(1, min(budget, int(limit))))


def _as_array(args: ocp.RestoreArgs, recorded: ocp.metadata.ShardingMetadata | None) -> ocp.RestoreArgs:
    """Return arguments that restore the `jax.Array` that was saved, unless they say what to restore and where."""
    if args.restore_type is None and not isinstance(args, ocp.ArrayRestoreArgs):
        return ocp.ArrayRestoreArgs(dtype=args.dtype, sharding=recorded)
    if args.restore_type is None:
        args = dataclasses.replace(args, restore_type=jax.Array)
    if isinstance(args, ocp.ArrayRestoreArgs) and args.restore_type is jax.Array and not _has_sharding(args):
        return dataclasses.replace(args, sharding=recorded)
    return args


def _has_sharding(args: ocp.ArrayRestoreArgs) -> bool:
    return args.sharding is not None or args.mesh is not None or args.mesh_axes is not None
