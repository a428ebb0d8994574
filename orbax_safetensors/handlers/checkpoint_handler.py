"""`SafetensorsHandler` and its arguments: safetensors files as an item of an Orbax checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.typing import DTypeLike

from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.format.layout import MAX_FILE_BYTES
from orbax_safetensors.handlers._compat import build_default_tree_metadata
from orbax_safetensors.mapping import Family
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.request import RestoreRequest
from orbax_safetensors.restore.run import restore
from orbax_safetensors.restore.saved_tree import SavedLeaf, saved_tree
from orbax_safetensors.save.job import SaveJob, prepare
from orbax_safetensors.save.request import Existing, Rest, SaveRequest
from orbax_safetensors.storage.paths import as_text

logger = logging.getLogger(__name__)

_Args = TypeVar("_Args")


class SafetensorsHandler(ocp.AsyncCheckpointHandler):
    """Restore and save sharded arrays as `.safetensors` files: each process moves the bytes of its own shards.

    ```python
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        params = checkpointer.restore("/models/llama")
        checkpointer.save("/models/copy", params)
    ```

    It works wherever Orbax takes a handler: `ocp.Checkpointer`, `ocp.AsyncCheckpointer`, `ocp.CheckpointManager`,
    `ocp.CompositeCheckpointHandler`.
    """

    def __init__(
        self,
        *,
        family: Family | str | None = None,
        variant: Mapping[str, Any] | None = None,
        options: SafetensorsOptions | None = None,
        multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
    ) -> None:
        """`family` and `variant` are for restores and saves whose arguments have none; see `SafetensorsRestore`.

        `options` say how bytes are moved; the defaults suit local disks. `multiprocessing_options` are those of the
        checkpointer that uses the handler, and say which processes save: all of `active_processes` together, or with
        `primary_host=None` each by itself, into a directory of its own, the arrays that it holds entirely.
        """
        self._family = family
        self._variant = variant
        self._options = SafetensorsOptions.of(options)
        self._multiprocessing_options = multiprocessing_options or ocp.options.MultiprocessingOptions()

    def restore(self, directory: epath.PathLike, args: SafetensorsRestore | None = None) -> Any:
        """Restore the item in `directory`; see `SafetensorsRestore`."""
        args = SafetensorsRestore() if args is None else checked(args, SafetensorsRestore)
        request = RestoreRequest(
            path=as_text(directory),
            item=args.item,
            restore_args=args.restore_args,
            partial=args.partial_restore,
            family=self._family if args.family is None else args.family,
            variant=self._variant if args.variant is None else args.variant,
            options=self._options,
        )
        if args.item is not None and args.restore_args is None:
            request = dataclasses.replace(request, item=None).for_target(args.item)
        return restore(request)

    def metadata(self, directory: epath.PathLike) -> Any:
        """Return Orbax's metadata of the tree that a restore without arguments returns: shapes, dtypes, shardings.

        Needs no device. Tensors whose elements are less than a byte are described as they are held, packed in `uint8`.
        """

        def described(leaf: SavedLeaf) -> ocp.metadata.Metadata:
            is_array = leaf.kind in (jax.Array, np.ndarray)
            kind: Any = ocp.metadata.ArrayMetadata if is_array else ocp.metadata.ScalarMetadata
            return kind(
                name=leaf.name,
                directory=_directory(directory),
                shape=leaf.view.shape,
                sharding=leaf.sharding,
                dtype=leaf.view.dtype,
            )

        try:
            stored = read_checkpoint(directory, self._options.storage_options)
            dequantize = self._options.dequantize
            tree = saved_tree(stored, self._family, self._variant, complete=True, dequantize=dequantize)
            leaves = tree.map(described)
        except SafetensorsError as error:  # Orbax drops errors of this method
            logger.error("%s", error)
            raise
        return build_default_tree_metadata(leaves, custom_metadata=tree.checkpoint.metadata)

    def save(self, directory: epath.PathLike, args: SafetensorsSave, existing: Existing = "kept") -> None:
        """Save an item into `directory`; see `SafetensorsSave`. Every active process calls this.

        Orbax makes the directory. On an object store it can exist before, and is refused if it holds a checkpoint
        unless `existing` says otherwise.
        """
        self._prepare(directory, args, existing).run()

    async def async_save(self, directory: epath.Path, args: SafetensorsSave) -> list[ocp.Future]:
        """Start a save, and return once the shards are in host memory; then leaves may be changed, donated or deleted.

        NumPy leaves and arrays on accelerators are copied; the memory of arrays on CPU devices is kept until it is
        written. The future is done when all processes have written.
        """
        job = self._prepare(directory, args).kept()

        async def commit() -> None:
            job.run()

        return [ocp.future.CommitFutureAwaitingContractedSignals(commit(), name="safetensors_save")]

    def _prepare(self, directory: epath.PathLike, args: SafetensorsSave, existing: Existing = "kept") -> SaveJob:
        args = checked(args, SafetensorsSave)
        arguments: dict[str, Any] = {
            field.name: getattr(args, field.name) for field in dataclasses.fields(SafetensorsSave)
        }
        if args.family is None:
            arguments["family"] = self._family
        if args.variant is None:
            arguments["variant"] = self._variant
        active = ActiveProcesses.of(self._multiprocessing_options)
        return prepare(SaveRequest(directory, **arguments, options=self._options, existing=existing, active=active))

    def close(self) -> None:
        """Do nothing: files and threads live no longer than a restore or save."""


@ocp.args.register_with_handler(SafetensorsHandler, for_restore=True)
@dataclasses.dataclass
class SafetensorsRestore(ocp.args.CheckpointArgs):
    """Say what to restore.

    ```python
    mesh = jax.sharding.Mesh(jax.devices(), ("model",))
    norm = jax.ShapeDtypeStruct((64,), jnp.bfloat16, sharding=NamedSharding(mesh, P("model")))
    args = ost.SafetensorsRestore({"model.norm.weight": norm}, partial_restore=True)
    params = ocp.Checkpointer(ost.SafetensorsHandler()).restore("/models/llama", args=args)
    ```

    With neither `item` nor `restore_args`, a restore returns the tree that was saved: its containers and empty nodes as
    Orbax restores them, arrays with their shardings, or as NumPy arrays in one process with other devices. If that tree
    is not noted beside the files, it returns all tensors as a flat dict of NumPy arrays, in one process only.

    Attributes:
      item: a tree of `jax.ShapeDtypeStruct`, arrays, shardings, Orbax metadata or Python scalars; any pytree, such as
        an `nnx.State` or a module of Equinox, whose functions stay as they are. The restored tree has its structure. A
        leaf's name in the checkpoint is its key path joined by dots. A leaf that describes an array, as a
        `jax.ShapeDtypeStruct` does, comes back as a `jax.Array` if it or `restore_args` has a sharding. If neither has,
        it comes back as a NumPy array of its dtype, 64 bits included, and is an error if there are several processes: a
        file does not say on which devices an array was. `ocp.ArrayRestoreArgs()` without a sharding makes it a
        `jax.Array` on the default device. A tensor is cast to the dtype of such a leaf; from floating point to integers
        or bool, that is an error, and only the `dtype` of `restore_args` casts so. Without `restore_args`, `item` may
        also be a mesh, a sharding or a function that returns one, as the target of `load`.
      restore_args: a tree of `ocp.RestoreArgs` or `ocp.ArrayRestoreArgs` of the same structure, or the tree itself if
        there is no `item`. A leaf's sharding, shape and dtype here take precedence over those of `item`.
      partial_restore: leave out tensors that the tree does not name, and ignore leaves of `restore_args` that `item`
        does not have. Files that hold none of the tensors may be missing. Without it, each of these is an error. Leaves
        that are `ocp.PLACEHOLDER`, and None or another empty node in the place of an array, count as named, are not
        read, and come back as they are.
      family: how a model's tree is made of the stored tensors: a `mapping.Family`, the name of one
        (`"maxtext.qwen3"`), or the part before the dot, which finds the rest by the architecture in the checkpoint's
        `config.json`. Names are then paths in the model's tree, joined by dots, and a restore without `item` and
        `restore_args` returns that tree of NumPy arrays. None finds a family that was registered for the architecture;
        if there is none, and with `"identity"`, names are those of the stored tensors. A leading `params`
        level is optional.
      variant: the family's switches, as `{"scan_layers": False}`. Others have the values that a link or a save of the
        directory has recorded, those that follow from the config, or the family's defaults. If these do not fit, they
        follow from the leaves' names and shapes if the family says how, as MaxText's do.
      transforms: None, or an empty dict, which to Orbax means `partial_restore=True`.

    Raises:
      SafetensorsError: `transforms` is not empty.
    """

    item: Any = None
    restore_args: Any = None
    partial_restore: bool = False
    family: Family | str | None = None
    variant: Mapping[str, Any] | None = None
    transforms: Any = None

    def __post_init__(self) -> None:
        # Orbax's arguments take the tree out of what `metadata` returns.
        orbax_args = ocp.args.PyTreeRestore(self.item, self.restore_args)
        self.item, self.restore_args = orbax_args.item, orbax_args.restore_args
        if self.transforms is not None:
            if jax.tree.leaves(self.transforms):
                raise SafetensorsError(
                    "transforms cannot be applied to safetensors: describe the tree with a family, or transform it "
                    "after the restore"
                )
            self.partial_restore = True


@ocp.args.register_with_handler(SafetensorsHandler, for_save=True)
@dataclasses.dataclass
class SafetensorsSave(ocp.args.CheckpointArgs):
    """Say what to save.

    ```python
    args = ost.SafetensorsSave({"w": jnp.ones((64, 512))}, metadata={"epoch": "3"})
    ocp.Checkpointer(ost.SafetensorsHandler()).save("/models/new", args=args)
    ```

    Attributes:
      item: a tree of `jax.Array` with any sharding, NumPy arrays and Python or NumPy scalars; every process passes the
        same. A tensor's name is its leaf's key path joined by dots. Leaves that are `ocp.PLACEHOLDER`, and None, are
        left out.
      save_args: a tree of `ocp.SaveArgs` of the same structure, whose `dtype` is a cast while writing; leaves for empty
        nodes are ignored.
      metadata: text for the header of every file, besides `{"format": "pt"}`.
      max_file_bytes: the most that a file holds; more tensors go into several files with an index. 5 GB as on the Hub.
      family: as for `SafetensorsRestore`; the save stores the tensors that the tree is made of.
      variant: as for `SafetensorsRestore`.
      config: what a family needs to know of the model: the content of a `config.json`, an object with a `to_dict`, as
        `transformers` has them, or a path or URL of such a file or of a directory with one, whose other small files
        are then copied, too. The save writes it beside the tensors as `config.json`, without `quantization_config`
        unless the tensors are such codes and scales. With the config of a PEFT adapter, it writes
        `adapter_model.safetensors` and `adapter_config.json`.
      like: the path or URL of a checkpoint, a directory or one file. The save stores the same tensors, under the same
        names, in the same dtypes, order and files, and copies its config and, from a directory, all other small files
        that are not weights; `config` takes precedence. Each leaf has a place there. Values of floating point are
        rounded to the stored dtype. Quantised tensors that a family decodes are stored as the config's dtype, and the
        config is then without `quantization_config`. The checkpoint must not lie in the destination: with `force=True`,
        `ocp.Checkpointer` deletes the destination before the save reads it. `SafetensorsCheckpointer` refuses this. It
        must stay until the save has ended.
      rest: what happens to tensors of `like` that the family has no leaf for, such as the tower of a model that also
        reads images. "copy" copies them, a few at a time, except those that follow from others, such as tied heads;
        "leave" leaves them out. The log names them.
      index: whether to write an index with which Orbax restores this tree from the files by itself. None writes one if
        that is possible; with True the save fails if it is not.
      dtype: to cast arrays of floating point to while writing: one for all leaves, or dtypes by regular expressions
        of names, as for `load`. It takes precedence over `save_args` and over the dtypes of `like`. The config that is
        written names the dtype of most values; a `config` without an architecture gets the family's. Tensors that are
        copied from `like` keep theirs.
    """

    item: Any
    save_args: Any = None
    metadata: Mapping[str, str] | None = None
    max_file_bytes: int = MAX_FILE_BYTES
    family: Family | str | None = None
    variant: Mapping[str, Any] | None = None
    config: Any = None
    like: epath.PathLike | None = None
    rest: Rest = "copy"
    index: bool | None = None
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None


def checked(args: Any, kind: type[_Args]) -> _Args:
    """Return `args`; those of another handler may have fields of the same names, and more that would be lost."""
    if not isinstance(args, kind):
        raise SafetensorsError(
            f"expected orbax_safetensors.{kind.__name__}, found {type(args).__name__}: pass ost.{kind.__name__}(...), "
            f"or keep these args with Orbax's handler after ost.register({'save=True' * (kind is SafetensorsSave)})"
        )
    return args


def _directory(path: epath.PathLike) -> epath.Path | None:
    """Return a path as Orbax has it in metadata, or None for a URL of a kind that it does not know."""
    try:
        return epath.Path(path)
    except KeyError:
        return None
