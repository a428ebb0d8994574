"""A handler of trees of Orbax's with our handler of arrays in its registry."""

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost

th = ocp.type_handlers


def make_handler(**kwargs):
    """Orbax's handler of trees with ours in its registry."""
    registry = th.create_type_handler_registry(
        (int, th.ScalarHandler()),
        (float, th.ScalarHandler()),
        (np.number, th.ScalarHandler()),
        (np.ndarray, th.NumpyHandler()),
        (str, th.StringHandler()),
        (jax.Array, ost.SafetensorsTypeHandler()),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **kwargs)


def sharded_args(tree, mesh, axis):
    """Restore arguments that shard what divides by four by `axis`, and say nothing of what are not arrays."""

    def args(leaf):
        if not isinstance(leaf, jax.Array):
            return ocp.RestoreArgs(restore_type=type(leaf))
        spec = [None] * leaf.ndim
        if leaf.ndim and leaf.shape[axis] % 4 == 0:
            spec[axis] = "y"
        return ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P(*spec)))

    return jax.tree.map(args, tree)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(other, str):
            assert one == other
            continue
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
        assert np.shape(one) == np.shape(other)
        assert np.asarray(one).tobytes() == np.asarray(other, np.asarray(one).dtype).tobytes()
