"""What conversions say that they did."""

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.orbax_store import open_orbax
from orbax_safetensors.streaming import orbax_sink
from tests.support.roots import TESTDATA

HF = TESTDATA / "maxtext" / "qwen3" / "hf"
SMALL = 40_000  # bytes of memory with which everything takes many batches

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.mark.parametrize("dtype", [None, {"kernel|proj": "float64"}])
def test_bytes_are_those_that_are_written(dtype, tmp_path):
    """With the dtypes of the destination, either way, and without the padding that a family adds."""
    padded = {"family": "maxtext", "variant": {"vocab_size": 128}, "memory_bytes": SMALL}
    there = ost.convert(HF, tmp_path / "orbax", to="orbax", dtype=dtype, **padded)
    leaves = open_orbax(there.path).leaves.values()
    assert there.nbytes == sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in leaves if leaf.shape)
    source = ost.convert(HF, tmp_path / "from", to="orbax", **padded).path
    back = ost.convert(source, tmp_path / "hf", to="safetensors", dtype=dtype, config=HF, **padded)
    assert back.nbytes == ost.open_checkpoint(back.path).nbytes


def test_figures_are_whole_however_late_callbacks_run(monkeypatch, tmp_path):
    """A future wakes those who wait for it before it calls them."""
    arguments = {"to": "orbax", "family": "maxtext", "memory_bytes": SMALL}
    expected = ost.convert(HF, tmp_path / "one", **arguments)
    begin_write, late = orbax_sink.begin_write, []

    def begin(*args, **more):
        writing = begin_write(*args, **more)
        writing.add_done_callback = late.append
        return writing

    monkeypatch.setattr(orbax_sink, "begin_write", begin)
    done = ost.convert(HF, tmp_path / "two", **arguments)
    assert late
    assert (done.nbytes, done.requests) == (expected.nbytes, expected.requests)
