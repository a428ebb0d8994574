"""`load`, `abstract` and `save`: a checkpoint in one call, for programs that do not use Orbax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.typing import DTypeLike

from orbax_safetensors.format.layout import MAX_FILE_BYTES
from orbax_safetensors.handlers.checkpoint_handler import SafetensorsSave
from orbax_safetensors.handlers.checkpointer import SafetensorsCheckpointer
from orbax_safetensors.mapping import Family
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.request import Partial, RestoreRequest
from orbax_safetensors.restore.run import prepare, restore
from orbax_safetensors.save.request import Rest
from orbax_safetensors.storage.paths import PathLike


def load(
    path: PathLike,
    target: Any = None,
    *,
    family: Family | str | None = None,
    variant: Mapping[str, Any] | None = None,
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    partial: Partial = False,
    options: SafetensorsOptions | None = None,
) -> Any:
    """Restore a directory of `.safetensors` files, or one file; each process reads the bytes of its own shards.

    ```python
    mesh = jax.sharding.Mesh(jax.devices(), ("model",))
    params = ost.load("/models/qwen3", mesh, family="maxtext")  # MaxText's tree, sharded over the mesh

    params = ost.load("/models/llama", NamedSharding(mesh, P()))  # stored names, and the whole of each on every device

    first = ost.load("/models/qwen3", mesh, dtype="float32", partial=["model.embed_tokens.*", "model.layers.0.*"])
    ```

    Args:
      path: a path or URL, as for `open_checkpoint`.
      target (tree | jax.sharding.Mesh | jax.sharding.Sharding | Callable | None): where arrays go.
        None returns what `SafetensorsRestore` does without arguments: the tree that was saved, or NumPy arrays.
        A tree of arrays, `jax.ShapeDtypeStruct`s, shardings or `ocp.RestoreArgs`, as for `SafetensorsRestore`, comes
        back with its leaves restored.
        A mesh returns the same tree as None. It splits each array along one dimension: the one with the fewest bytes to
        read, and the longest of several such. Mesh axes that do not divide the dimension are dropped.
        A sharding applies to all arrays of that tree. A function gets the name and the shape of each array, and returns
        its sharding, or None for a NumPy array. A name is a leaf's path in the tree, joined by dots.
      family, variant: as for `SafetensorsRestore`.
      dtype: what to cast floating-point arrays to, whatever the target describes: one dtype for all, or a dict from
        regular expressions to dtypes. The first that `re.search` finds in a leaf's name counts.
      partial: which leaves to restore. With a tree, True leaves out what it does not name. With another target, names
        of leaves, or patterns of names in which `*` stands for any characters, return the tree with these alone.
      options: how bytes are moved.

    Raises:
      TensorMismatchError: the target, `dtype` or `partial` does not fit the checkpoint.
      MappingError: there is no such family, or it does not fit the checkpoint.
      StorageError, HeaderError, IndexFileError: as for `open_checkpoint`.
    """
    return restore(RestoreRequest.of(path, target, family, variant, options, dtype, partial))


def abstract(
    path: PathLike,
    target: Any = None,
    *,
    family: Family | str | None = None,
    variant: Mapping[str, Any] | None = None,
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    partial: Partial = False,
    options: SafetensorsOptions | None = None,
) -> Any:
    """Describe the tree that `load` returns for the same arguments; reads headers only, so that a step can be compiled.

    ```python
    mesh = jax.sharding.Mesh(jax.devices(), ("model",))
    shapes = ost.abstract("/models/qwen3", mesh, family="maxtext")
    largest = jax.jit(lambda params: jax.tree.map(jnp.max, params)).lower(shapes).compile()  # while a thread loads
    print(largest(ost.load("/models/qwen3", shapes, family="maxtext")))
    ```

    Each `jax.Array` is a `jax.ShapeDtypeStruct` of its shape, dtype and sharding. What `load` returns without devices
    is described by a value of its type, which takes no memory: a NumPy array by a read-only one of zeros, a scalar by
    0. `jax.jit` lowers both.

    The tree is also a target of `load`, which returns the same arrays. Pass `family` and `variant` again, and
    `partial=True` if the tree leaves out tensors. Three things are not in the tree, and need the first target again:
    arrays that are padded, truncated or sent from one replica to the others; scalars of NumPy, which would be arrays;
    and the refusal to round stored 64-bit values that JAX holds in 32 bits.

    Each process calls this for itself and waits for no other. A mesh may be abstract: shardings are then over this
    mesh, no device is needed, and `load` puts the arrays on the mesh that `jax.set_mesh` has set.

    Args:
      path, target, family, variant, dtype, partial, options: as for `load`.

    Raises:
      TensorMismatchError, MappingError, StorageError, HeaderError, IndexFileError: as for `load`, if it would raise
        before it reads a tensor.
    """
    matched = prepare(RestoreRequest.of(path, target, family, variant, options, dtype, partial), abstract=True).matched
    return matched.tree(leaf.described() for leaf in matched.targets)


def save(
    path: PathLike,
    tree: Any,
    *,
    family: Family | str | None = None,
    variant: Mapping[str, Any] | None = None,
    config: Any = None,
    like: PathLike | None = None,
    rest: Rest = "copy",
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    index: bool | None = None,
    force: bool = False,
    overwrite: bool = False,
    options: SafetensorsOptions | None = None,
) -> None:
    """Save a tree as a directory of `.safetensors` files; every process calls this and writes its own shards.

    ```python
    params = {"embed": jnp.ones((64, 512), jnp.bfloat16), "norm": jnp.ones(512)}
    ost.save("/models/new", params, metadata={"epoch": "3"})
    ```

    Args:
      path: a directory that does not exist, or the URL of one on an object store.
      tree: of `jax.Array`s with any sharding, NumPy arrays and scalars, the same in every process.
      family, variant, config, like, rest, metadata, max_file_bytes, index: as for `SafetensorsSave`.
      dtype: what to cast floating-point arrays to while writing, as for `load`. A config names the new dtype.
      force: put the new checkpoint in the place of all that is in `path`, which must be a checkpoint or empty, once it
        is complete. On a file system, `path` is there at every moment, and a save that fails changes nothing.
      overwrite: the same, as Orbax's v1 API calls it.
      options: how bytes are moved.

    Raises:
      TensorMismatchError, MappingError, HeaderError: the tree or the metadata cannot be stored, or `dtype` does not fit
        the tree.
      StorageError: `path` exists, and neither `force` nor `overwrite` is set or it holds no checkpoint but something
        else, or it cannot be written, or `like` cannot be read.
    """
    args = SafetensorsSave(
        tree,
        metadata=metadata,
        max_file_bytes=max_file_bytes,
        family=family,
        variant=variant,
        config=config,
        like=like,
        rest=rest,
        dtype=dtype,
        index=index,
    )
    with SafetensorsCheckpointer(options=options) as checkpointer:
        checkpointer.save(path, args=args, force=force or overwrite)
