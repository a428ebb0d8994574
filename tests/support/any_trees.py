"""Trees of any classes that JAX takes for nodes, with children or without, and Hypothesis strategies for them."""

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import strategies as st
from jax.experimental.sparse import BCOO


@flax.struct.dataclass
class Struct:
    left: Any
    right: Any
    name: str = flax.struct.field(pytree_node=False, default="struct")


@flax.struct.dataclass
class EmptyStruct:
    pass


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """As a function or a config among the parts of a module."""

    number: int = 7


@jax.tree_util.register_static
class StaticList(list):
    """A list to Orbax, and a node without children to JAX."""

    def __hash__(self):
        return 1


class Numbered:
    """Registered without key paths, so that JAX numbers its children."""

    def __init__(self, *children):
        self.children = children


class NumberedDict(dict):
    """A dict with another registration than that of dicts."""


class NumberedList(list):
    """A list with another registration than that of lists."""


jax.tree_util.register_pytree_node(Numbered, lambda node: (node.children, None), lambda _, found: Numbered(*found))
jax.tree_util.register_pytree_node(
    NumberedDict,
    lambda node: (tuple(node.values()), tuple(node)),
    lambda keys, found: NumberedDict(zip(keys, found, strict=True)),
)
jax.tree_util.register_pytree_node(NumberedList, lambda node: (tuple(node), None), lambda _, found: NumberedList(found))


class Keyed(Numbered):
    """Registered with the names of attributes."""


jax.tree_util.register_pytree_with_keys(
    Keyed,
    lambda node: (
        [(jax.tree_util.GetAttrKey(f"part{number}"), child) for number, child in enumerate(node.children)],
        None,
    ),
    lambda _, found: Keyed(*found),
)


class Strict(Numbered):
    """Checks its children, as classes should not when JAX makes them."""

    def __init__(self, *children):
        assert all(isinstance(child, jax.Array) for child in children)
        super().__init__(*children)


jax.tree_util.register_pytree_node(Strict, lambda node: (node.children, None), lambda _, found: Strict(*found))

EMPTY_NODES = {
    "None": None,
    "dict": {},
    "list": [],
    "tuple": (),
    "frozen dict": flax.core.FrozenDict(),
    "ordered dict": collections.OrderedDict(),
    "default dict": collections.defaultdict(int),
    "nnx state": nnx.State({}),
    "named tuple": optax.EmptyState(),
    "flax": EmptyStruct(),
    "static": Static(),
    "static list, empty": StaticList(),
    "static list": StaticList([1]),
    "numbered": Numbered(),
    "keyed": Keyed(),
    "numbered dict": NumberedDict(),
    "numbered list": NumberedList(),
}

_numbers = st.integers(0, 100)
leaves = st.one_of(
    _numbers,
    _numbers.map(float),
    _numbers.map(lambda number: np.full((2, 1), number, np.int16)),
    _numbers.map(lambda number: jnp.full(3, number, jnp.float32)),
)
_keys = st.sampled_from(["a", "b", "10", "9", "weight"])


def _nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several, named = st.lists(inner, min_size=1, max_size=3), st.dictionaries(_keys, inner, min_size=1, max_size=3)
    return st.one_of(
        several,
        named,
        several.map(tuple),
        named.map(flax.core.FrozenDict),
        st.dictionaries(st.integers(0, 20), inner, min_size=1, max_size=3),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
        st.tuples(inner, inner).map(lambda both: Struct(*both)),
        several.map(lambda found: Numbered(*found)),
        several.map(lambda found: Keyed(*found)),
        several.map(NumberedList),
        named.map(NumberedDict),
        st.tuples(several, named).map(lambda both: jax.tree_util.Partial(jnp.add, *both[0], **both[1])),
        _numbers.map(lambda number: BCOO.fromdense(np.eye(2, dtype=np.float32) * (number + 1))),
    )


trees = _nodes(st.recursive(leaves | st.sampled_from(list(EMPTY_NODES.values())), _nodes, max_leaves=8))
