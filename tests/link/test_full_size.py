"""Full-size models, linked: nothing is moved, and TensorStore opens any array."""

import json
from math import prod

import numpy as np
import pytest
import tensorstore as ts

import orbax_safetensors as ost
from orbax_safetensors.format.dtypes import nbytes
from tests.support.full_size import make, stored

pytestmark = pytest.mark.full_size

MAXTEXT = {"family": "maxtext", "variant": {"scan_layers": True}}
MOST_METADATA_BYTES = 64 * 2**20


def arrays(directory):
    """The names of the arrays of a checkpoint."""
    entries = json.loads((directory / "_METADATA").read_text())["tree_metadata"].values()
    return [
        ".".join(part["key"] for part in entry["key_metadata"])
        for entry in entries
        if entry["value_metadata"]["value_type"] == "jax.Array"
    ]


def opened(directory, name):
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}, "path": f"{name}/"}
    return ts.open({"driver": "zarr3", "kvstore": kvstore}, context=ts.Context()).result()


def test_deepseek_v3(tmp_path):
    """As it is stored: each of many tensors is an array."""
    num_arrays = 46_183
    (tmp_path / "model").mkdir()
    done = ost.link(make("deepseek-v3", tmp_path / "model"), tmp_path / "link")
    assert done.made_bytes == 0
    assert done.num_arrays == num_arrays
    assert done.linked_bytes > 1.3e12
    written = [path for path in (tmp_path / "link").rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in written) < MOST_METADATA_BYTES
    names = arrays(tmp_path / "link")
    assert len(names) == num_arrays
    for name in names[:: max(num_arrays // 7, 1)]:
        array = opened(tmp_path / "link", name)
        corner = array[tuple(slice(min(size, 2)) for size in array.shape)].read().result()
        assert not np.any(corner)
        assert prod(array.chunk_layout.read_chunk.shape) * array.dtype.numpy_dtype.itemsize <= 16 * 2**20


def test_plans(tmp_path):
    """Llama's queries and keys are permuted inside of heads, and have to be made."""
    model = "llama-3.1-405b"
    make(model, tmp_path)
    plan = ost.plan_link(tmp_path, tmp_path / "link", **MAXTEXT)
    assert plan.linked_bytes + plan.made_bytes == sum(nbytes(*facts) for facts in stored(model).values())
    assert 0 < plan.made_bytes <= 0.1 * plan.linked_bytes
