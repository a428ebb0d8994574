"""`RestoreRequest`: what a caller wants to be restored, and what follows from that before a checkpoint is open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.devices.casts import Casts
from orbax_safetensors.devices.trees import flatten
from orbax_safetensors.errors import TargetTypeError, TensorMismatchError
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.leaf_request import LeafRequest, leaf_request, meant
from orbax_safetensors.storage.paths import PathLike, as_text

# The sharding of an array, of its name and shape; None for a NumPy array.
ShardingOf = Callable[[str, tuple[int, ...]], Any]

# Whether a tree may leave out tensors, or which leaves to restore, by names and patterns such as `*.layers.0.*`.
Partial = bool | Iterable[str]


_TARGETS = "target: expected a tree, a mesh, a sharding or a function that returns one"


@dataclass(frozen=True, kw_only=True)
class RestoreRequest:
    """What to restore from `path`; see `SafetensorsRestore`.

    Attributes:
      sharding_of: the shardings of all arrays, if there are no `item` and `restore_args`.
      mesh: over which all arrays are sharded, each in the dimension that reads least, if there are none of these.
      partial: whether to leave out tensors that the tree does not name.
      only: the names of the leaves to restore, and shell patterns of names, if there is no tree; empty for all.
      casts: of the leaves, whatever dtype they are described with.
      by_name: whether `restore_args` are leaves by name: stored tensors, or the whole tree of a family that is
        registered for the architecture, in the variant whose tree has these leaves.
    """

    path: str
    item: Any = None
    restore_args: Any = None
    sharding_of: ShardingOf | None = None
    mesh: Mesh | AbstractMesh | None = None
    partial: bool = False
    only: tuple[str, ...] = ()
    casts: Casts | None = None
    by_name: bool = False
    family: FamilyLike = None
    variant: Mapping[str, Any] | None = None
    options: SafetensorsOptions

    @staticmethod
    def of(
        path: PathLike,
        target: Any,
        family: FamilyLike,
        variant: Mapping[str, Any] | None,
        options: SafetensorsOptions | None,
        dtype: Any,
        partial: Partial,
    ) -> RestoreRequest:
        """Return the request for a `target`: an item, restore arguments, a mesh, a sharding or a function to shardings.

        Raises `TargetTypeError` if it is something else, such as a class, or a mesh without axes, and
        `TensorMismatchError` if `dtype` or `partial` is wrong.
        """
        request = RestoreRequest(
            path=as_text(path),
            partial=partial is True,
            only=_names(partial),
            casts=None if dtype is None else Casts(dtype),
            family=family,
            variant=variant,
            options=SafetensorsOptions.of(options),
        )
        request = request.for_target(target)
        if request.has_tree and request.only:
            raise TargetTypeError("partial: names are for a target that is not a tree; a tree takes partial=True")
        return request

    def for_target(self, target: Any) -> RestoreRequest:
        """Return the request for a target; see `of`."""
        if isinstance(target, jax.sharding.Sharding | Format):
            return replace(self, sharding_of=lambda *_: target)
        if isinstance(target, Mesh | AbstractMesh):
            if not target.shape:
                raise TargetTypeError(f"target: expected a mesh with axes, found {target!r}")
            return replace(self, mesh=target)
        # A module may be a tree that can be called.
        is_leaf, is_other = jax.tree_util.all_leaves([target]), isinstance(target, type | np.dtype)
        if is_leaf and callable(target) and not is_other:
            return replace(self, sharding_of=target)
        describes_leaf = hasattr(target, "shape") or isinstance(target, ocp.RestoreArgs | int | float)
        if is_leaf and (is_other or not describes_leaf):
            raise TargetTypeError(f"{_TARGETS}, found {target!r}{meant(target)}")
        leaves = jax.tree_util.tree_leaves(target)
        if leaves and all(isinstance(leaf, jax.Device) for leaf in leaves):
            raise TargetTypeError(f"{_TARGETS}, found devices{meant(leaves[0])}")
        if any(isinstance(leaf, ocp.RestoreArgs) for leaf in leaves):
            return replace(self, restore_args=target)
        return replace(self, item=target)

    @property
    def shards_all(self) -> bool:
        """Whether the caller says how all arrays are sharded, whichever the checkpoint has."""
        return self.sharding_of is not None or self.mesh is not None

    @property
    def leaves_out(self) -> bool:
        """Whether tensors may be left out, and so may be missing."""
        return self.partial or bool(self.only)

    @property
    def has_tree(self) -> bool:
        """Whether the caller says which leaves to restore."""
        return self.item is not None or self.restore_args is not None

    def leaf_requests(self) -> set[LeafRequest]:
        """Return the distinct requests for leaves of the tree, except wrong ones."""
        requests = set()
        for leaf, args in self._leaves().values():
            if leaf is not ocp.PLACEHOLDER and args is not ocp.PLACEHOLDER:
                args = args if isinstance(args, ocp.RestoreArgs) else ocp.RestoreArgs()
                with suppress(TensorMismatchError):
                    requests.add(leaf_request(leaf if self.item is not None else None, args))
        return requests

    def leaf_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shapes that the leaves of the tree must have, by name; None if the request does not say."""
        shapes: dict[str, tuple[int, ...] | None] = {}
        for name, (leaf, args) in self._leaves().items():
            is_exact = getattr(args, "strict", True)
            shape = getattr(args, "global_shape", None)
            if shape is None:
                shape = getattr(leaf, "shape", None)
            shapes[name] = tuple(shape) if is_exact and isinstance(shape, tuple | list) else None
        return shapes

    def _leaves(self) -> dict[str, tuple[Any, Any]]:
        """Return each leaf of the tree with its restore arguments, None without, by name."""
        leaves = flatten(self.item if self.item is not None else self.restore_args)[1]
        args = flatten(self.restore_args)[1] if self.restore_args is not None else {}
        return {name: (leaf, args.get(name)) for name, leaf in leaves.items()}


def _names(partial: Any) -> tuple[str, ...]:
    """Return the names and patterns of `partial`."""
    if isinstance(partial, bool):
        return ()
    names = (partial,) if isinstance(partial, str) else tuple(partial) if isinstance(partial, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise TargetTypeError(f"partial: expected True, False, or names of leaves, found {partial!r}")
    return names
