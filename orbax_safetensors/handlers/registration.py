"""`register()`: existing code with Orbax's own handlers reads checkpoints whose arrays are safetensors."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import from_numpy
from orbax_safetensors.format.index import SUFFIX
from orbax_safetensors.handlers._compat import GLOBAL_TYPE_HANDLER_REGISTRY
from orbax_safetensors.handlers.type_handler import SafetensorsTypeHandler
from orbax_safetensors.mapping import Family, registry
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.orbax_store.index_note import read_note

# What leaves may be restored as, whatever they were when they were saved.
_TYPES: tuple[type, ...] = (jax.Array, np.ndarray, int, float)

_lock = threading.Lock()
_registered: dict[type, _FallbackTypeHandler] = {}
# Handlers by the names that checkpoints have for types. Several types share a name, and the handler added last has it.
_named: dict[str, ocp.type_handlers.TypeHandler] = {}


def register(*families: Family | str, save: bool = False, variant: Mapping[str, Any] | None = None) -> None:
    """Let Orbax's handlers of trees read checkpoints whose arrays are safetensors, in the whole program.

    ```python
    ost.register()
    params = {"w": jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)}
    ocp.PyTreeCheckpointer().restore("/models/state", item={"params": params})
    ```

    For a model package's `__init__`. From then on `ocp.PyTreeCheckpointHandler()`, `ocp.StandardCheckpointHandler()`
    and what is built on them restore what `SafetensorsTypeHandler` has saved, and directories from Hugging Face if an
    `item` describes the tree; they do everything else as before. With `save`, handlers that are made from then on also
    save array leaves as safetensors, unless the format cannot hold them. May be called again and from any thread: a
    registration stays until `unregister`.

    Args:
      families: for checkpoints of their architectures, unless a call names another family: a `mapping.Family`, the name
        of one (`"maxtext.qwen3"`), or the part before the dot, which stands for all of these. A family replaces one of
        the same name. To Orbax's handlers, the leaves of an `item` are stored tensors, or exactly those of the family's
        tree. A leading `params` level is optional.
      save: whether handlers also save safetensors.
      variant: the families' switches, as `{"scan_layers": False}`. For Orbax's handlers, switches that are missing here
        follow from the leaves' names and shapes, if the family says how, as MaxText's do.

    Raises:
      MappingError: there is no such family, or none of them has such switches. Nothing is registered then.
    """
    registry.register(families, variant)
    with _lock:
        for kind in _TYPES:
            if kind not in _registered:
                handler = _FallbackTypeHandler(kind, ocp.type_handlers.get_type_handler(kind))
                _registered[kind] = handler
                _named.setdefault(handler.typestr(), ocp.type_handlers.get_type_handler(handler.typestr()))
                _replace(kind, handler)
        _registered[jax.Array].saves |= save


def unregister() -> None:
    """Undo `register`: register the handlers again that it replaced.

    ```python
    ost.register("maxtext")
    ost.unregister()
    ```

    A handler that another package has registered since stays.
    """
    registry.unregister()
    with _lock:
        for kind, handler in _registered.items():
            if ocp.type_handlers.get_type_handler(kind) is handler:
                _replace(kind, handler.previous)
        for kind in ocp.type_handlers.supported_types():
            handler = ocp.type_handlers.get_type_handler(kind)
            if _named.get(handler.typestr()) is handler:
                _replace(kind, handler)
        _registered.clear()
        _named.clear()


def _replace(kind: type, handler: ocp.type_handlers.TypeHandler) -> None:
    GLOBAL_TYPE_HANDLER_REGISTRY.add(kind, handler, override=True, ignore_warnings=True)


class _FallbackTypeHandler(ocp.type_handlers.TypeHandler):
    """Read leaves that are in safetensors files, and leave all others to the handler that was registered before."""

    def __init__(self, kind: type, previous: ocp.type_handlers.TypeHandler) -> None:
        self.previous = previous
        self._kind = kind
        self.saves = False
        self._safetensors = SafetensorsTypeHandler()

    def __getattr__(self, name: str) -> Any:
        # Orbax looks for more in its own handlers than the interface has.
        if name == "previous":
            raise AttributeError(name)
        return getattr(self.previous, name)

    @property
    def _array_metadata_store(self) -> Any:
        # Orbax's handler of trees looks here for the shapes of Zarr chunks, which safetensors do not have.
        return None if self.saves else getattr(self.previous, "_array_metadata_store", None)

    def typestr(self) -> str:
        return str(self.previous.typestr())

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Any:
        is_ours = [self.saves and _can_store(value, info) for value, info in zip(values, infos, strict=True)]
        futures: list[Any] = []
        for handler, at in self._split(is_ours):
            futures += await handler.serialize(
                [values[i] for i in at], [infos[i] for i in at], None if args is None else [args[i] for i in at]
            )
        return futures

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return await self._each(infos, lambda handler, at: handler.metadata([infos[i] for i in at]))

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        if args is not None and self._kind is np.ndarray:  # Orbax takes leaves without metadata for NumPy arrays
            args = [arg if arg.restore_type else dataclasses.replace(arg, restore_type=np.ndarray) for arg in args]
        return await self._each(
            infos,
            lambda handler, at: handler.deserialize(
                [infos[i] for i in at], None if args is None else [args[i] for i in at]
            ),
        )

    def finalize(self, directory: Any) -> None:
        self.previous.finalize(directory)

    async def _each(self, infos: Sequence[Any], call: Callable[[Any, list[int]], Any]) -> list[Any]:
        """Return what `call` makes of all leaves, each with the handler that it belongs to."""
        stored = {directory: _stored_names(directory) for directory in {info.parent_dir for info in infos}}
        names = [stored[info.parent_dir] for info in infos]
        is_ours = [here is None or info.name in here for here, info in zip(names, infos, strict=True)]
        out: dict[int, Any] = {}
        for handler, at in self._split(is_ours):
            out |= zip(at, await call(handler, at), strict=True)
        return [out[i] for i in range(len(infos))]

    def _split(self, is_ours: Sequence[bool]) -> list[tuple[ocp.type_handlers.TypeHandler, list[int]]]:
        """Return the handlers that have something to do, and the positions of their leaves."""
        ours = [i for i, is_here in enumerate(is_ours) if is_here]
        others = [i for i, is_here in enumerate(is_ours) if not is_here]
        return [(handler, at) for handler, at in ((self._safetensors, ours), (self.previous, others)) if at]


def _can_store(value: jax.Array, info: Any) -> bool:
    """Return whether the format can hold a leaf; it cannot hold random keys, say, or elements of 4 bits."""
    try:
        from_numpy(np.dtype(value.dtype))
    except (TypeError, TensorMismatchError):
        return False
    return bool(info.name != "__metadata__")


def _stored_names(directory: Any) -> Set[str] | None:
    """Return the names of the leaves that safetensors files in a directory hold; None stands for all names.

    These are no names if it has no such files; the tensors' names beside a tree that Orbax has saved; all names if
    there is no tree of Orbax, as in a directory from Hugging Face, whose tensors have other names than the leaves that
    a family makes. They are no names either if an index says which parts of tensors the leaves of a family are: Orbax
    reads these by itself. Raises `StorageError` if there is an index and the files are no longer those it was made of.
    """
    if not any(path.name.endswith(SUFFIX) and path.is_file() for path in directory.iterdir()):
        return frozenset()
    if not (directory / TREE_FILE).exists():
        return None
    checkpoint = read_checkpoint(directory)
    if (note := read_note(checkpoint.store, checkpoint.path)) is not None:
        for fault in note.changed(checkpoint.path, checkpoint.fingerprints):
            raise fault
        if not note.names_tensors:
            return frozenset()
    return frozenset(checkpoint.tensors)
