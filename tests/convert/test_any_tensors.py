"""Any tensors, in any chunks: converted to Orbax's format, resharded, and converted back, they are the same bits."""

import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orbax_safetensors as ost
from tests.support.conversions import all_same, tensors
from tests.support.files import random_bits, write_indexed
from tests.support.strategies import examples

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

DTYPES = [np.float32, np.int8, np.uint16, np.int32, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
MESHES = [{"x": 2, "y": 4}, {"x": 8}, {"x": 3, "y": 1, "z": 2}]
names = st.lists(
    st.sampled_from(["w", "b", "layers.0.w", "layers.1.w", "layers.0.b c", "é.x"]), unique=True, min_size=1
)
hosts = st.builds(
    lambda dtype, shape, seed: random_bits(np.random.default_rng(seed), shape, np.dtype(dtype)),
    st.sampled_from(DTYPES),
    st.lists(st.sampled_from([1, 2, 6, 8, 24]), max_size=3).map(tuple),
    st.integers(0, 99),
)


@st.composite
def layouts(draw, arrays):
    """A mesh and, for some of the arrays, a spec that divides them; or neither."""
    mesh = draw(st.none() | st.sampled_from(MESHES))
    if mesh is None:
        return {}
    spec = {}
    for name, array in arrays.items():
        axes = draw(st.permutations(list(mesh)))
        spec[name] = tuple(
            axes.pop() if axes and size % mesh[axes[-1]] == 0 and draw(st.booleans()) else None for size in array.shape
        )
    return {"mesh": mesh, "spec": {f"^{name}$": entry for name, entry in spec.items()}}


@examples(15)
@given(st.data(), names, st.sampled_from([4000, 1 << 20]))
def test_there_and_back_bit_for_bit(data, names, memory_bytes):
    arrays = {name: data.draw(hosts) for name in names}
    options = {"memory_bytes": memory_bytes}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "hf").mkdir()
        write_indexed(root / "hf", [{name: array} for name, array in arrays.items()])
        ost.convert(root / "hf", root / "orbax", to="orbax", **data.draw(layouts(arrays)), **options)
        ost.reshard(root / "orbax", root / "other", **data.draw(layouts(arrays)), **options)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as stock:
            restored = stock.restore(root / "other" / "0" / "items", restore_args=None)
        found = {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(restored)
        }
        all_same(found, arrays)
        ost.convert(root / "other", root / "back", to="safetensors", **options)
        assert ost.verify(root / "back") == []
        all_same(tensors(root / "back"), arrays)
