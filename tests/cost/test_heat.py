"""Where in the files a plan reads: the ranges that executing it would ask for, counted stretch by stretch."""

from itertools import pairwise
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.open import open_checkpoint
from orbax_safetensors.cli.demo_worker import requested, union
from orbax_safetensors.cli.partition import spread
from orbax_safetensors.cost.heat import below, heat
from orbax_safetensors.geometry.strided import runs_of
from orbax_safetensors.restore.plan import distribution
from orbax_safetensors.transfer.plan import Block, transfer_plan
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "qwen3"
MESH = {"data": 2, "model": 4}


def restore(path, partition, *, mesh=MESH, process_count=4, max_gap_bytes=16, **family):
    checkpoint = open_checkpoint(path, **family)
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    target = {
        name: jax.ShapeDtypeStruct(
            view.shape, view.dtype, sharding=NamedSharding(abstract, PartitionSpec(*partition(view.shape)))
        )
        for name, view in checkpoint.leaves.items()
    }
    return distribution(checkpoint, target, process_count, ost.SafetensorsOptions(max_gap_bytes=max_gap_bytes))


def cuts_of(checkpoint, stretches):
    return [np.linspace(0, file.header.file_bytes, stretches + 1).astype(np.int64) for file in checkpoint.files]


def laid_out(found, cuts):
    return heat(
        found.leaves,
        found.checkpoint.location,
        cuts,
        process_count=found.process_count,
        max_gap_bytes=found.options.max_gap_bytes,
    )


def innermost(shape):
    return [None] * (len(shape) - 1) + ["model"] if shape and shape[-1] % 4 == 0 else []


@pytest.mark.parametrize(
    "family", [{}, {"family": "maxtext", "variant": {"scan_layers": True}}], ids=["stored", "tree"]
)
@pytest.mark.parametrize("partition", [lambda shape: spread(shape, MESH), innermost, lambda shape: ()])
@pytest.mark.parametrize("stretches", [1, 7, 100])
def test_what_is_read_is_where_the_plan_reads_it(family, partition, stretches):
    found = restore(QWEN3, partition, **family)
    cuts = cuts_of(found.checkpoint, stretches)
    drawn = laid_out(found, cuts)
    assert drawn.read.shape == drawn.needed.shape == (4, 3 * stretches)
    for process in range(4):
        blocks = [
            Block(leaf.view, box, box.shape, leaf.dtype)
            for leaf in found.leaves
            for box in dict.fromkeys(leaf.boxes[process])
        ]
        ranges = requested(transfer_plan(blocks, found.checkpoint.location, found.options.max_gap_bytes))
        expected = []
        for number, own in enumerate(cuts):
            read = union(ranges.get(number, []))
            for low, high in pairwise(own):
                expected.append(np.maximum(np.minimum(read[:, 1], high) - np.maximum(read[:, 0], low), 0).sum())
        assert drawn.read[process].tolist() == expected
        assert (drawn.needed[process] <= drawn.read[process]).all()
        assert drawn.needed[process].sum() == pytest.approx(found.plan().processes[process].needed_bytes)


def test_nothing_to_restore():
    found = restore(QWEN3, spread_nothing)
    empty = heat((), found.checkpoint.location, cuts_of(found.checkpoint, 5), process_count=2, max_gap_bytes=0)
    assert not empty.read.any()
    assert empty.read.shape == (2, 15)


def spread_nothing(shape):
    return ()


def test_full_size_models_encoded_or_not(full_size_model):
    _, directory = full_size_model
    mesh = {"fsdp": 16, "tensor": 4}
    found = restore(
        directory, lambda shape: spread(shape, mesh), mesh=mesh, process_count=8, max_gap_bytes=2**14, family="maxtext"
    )
    drawn = laid_out(found, cuts_of(found.checkpoint, 11))
    for read, needed, cost in zip(drawn.read, drawn.needed, found.plan().processes, strict=True):
        assert read.sum() == pytest.approx(cost.read_bytes)
        assert needed.sum() == pytest.approx(cost.needed_bytes)
        if found.checkpoint.quantized:  # in the plan, scales in another file count for the codes' file
            continue
        files = {file.file: file for file in cost.files}
        for number, path in enumerate(found.files):
            own = files[path].read_bytes if path in files else 0
            assert read[11 * number : 11 * (number + 1)].sum() == pytest.approx(own)


@given(st.data())
def test_bytes_below(data):
    length = data.draw(st.integers(1, 5))
    modes, reach = [], length
    for _ in range(data.draw(st.integers(0, 3))):
        size, gap = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 5))
        modes.append((size, reach + gap))
        reach += (size - 1) * (reach + gap)
    runs = runs_of(data.draw(st.integers(0, 9)), length, modes)
    assert runs.nbytes == length * prod(size for size, _ in modes)
    held = {begin + at for begin, count in runs.pieces(0, runs.nbytes) for at in range(count)}
    offsets = np.arange(-3, runs.end + 3)
    assert below(runs, offsets).tolist() == [sum(byte < offset for byte in held) for offset in offsets]
