"""The report counts exactly what `transfer_plan` plans, for whatever views and shardings."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_safetensors.plan import coalesce, plan
from orbax_safetensors.plan.plan import Block, transfer_plan
from orbax_safetensors.plan.report import Leaf, restore_plan
from orbax_safetensors.plan.view import View
from tests.plan.views import boxes, compositions

F4, F2 = np.dtype("f4"), np.dtype("f2")


class Places:
    """Tensors one after the other in files that hold `per_file` each."""

    def __init__(self, sizes, per_file):
        self.places, end = {}, 0
        for number, (name, nbytes) in enumerate(sizes):
            if number % per_file == 0:
                end = 100
            self.places[name] = (number // per_file, end)
            end += nbytes

    def locate(self, name):
        return self.places[name]


def planned(leaves, places, process, gap):
    destinations = []
    for leaf in leaves:
        for box in dict.fromkeys(leaf.boxes[process]):
            stored = tuple((min(a, n), min(b, n)) for (a, b), n in zip(box, leaf.view.shape, strict=True))
            destinations.append(Block(leaf.view, stored, tuple(b - a for a, b in box), leaf.dtype))
    return transfer_plan(destinations, places.locate, gap), destinations


@settings(max_examples=200)
@given(st.data(), st.sampled_from([0, 64]), st.integers(1, 3))
def test_the_report_counts_what_is_planned(data, gap, per_file):
    leaves, sizes = [], []
    for number in range(data.draw(st.integers(1, 4))):
        made = data.draw(compositions())
        renamed = {name: f"{number}.{name}" for name in made.stored}
        pieces = tuple(
            type(piece)(renamed[piece.tensor], piece.start, piece.offset, piece.dims) for piece in made.view.pieces
        )
        view = View(made.view.shape, F4, pieces)
        shape = tuple(size + data.draw(st.integers(0, 2)) for size in view.shape)
        held = [tuple(data.draw(st.lists(boxes(shape), min_size=1, max_size=3))) for _ in range(2)]
        leaves.append(Leaf(view, shape, data.draw(st.sampled_from([F4, F2])), held))
        sizes += [(renamed[name], array.nbytes) for name, array in made.stored.items()]
    places = Places(sizes, per_file)
    files = [f"f{number}" for number in range(len(sizes) + 1)]
    report = restore_plan(leaves, places.locate, files, max_gap_bytes=gap, threads=3, process_count=2)
    for process, cost in enumerate(report.processes):
        expected, destinations = planned(leaves, places, process, gap)
        assert cost.read_bytes == expected.moved_bytes
        assert cost.needed_bytes == expected.needed_bytes
        assert cost.num_requests == expected.num_requests
        assert cost.staging_bytes == 3 * expected.window_bytes
        assert cost.destination_bytes == sum(destination.nbytes for destination in destinations)
        for figure in ("read_bytes", "needed_bytes", "num_requests"):
            assert sum(getattr(file, figure) for file in cost.files) == getattr(cost, figure)
        requested = {extent.file for extent in expected.extents} | {part.file for part in expected.parts}
        assert {file.file for file in cost.files} == {f"f{number}" for number in requested}


def test_ranges_of_neighbouring_tensors_are_joined_and_long_ones_cut():
    limit = coalesce.MAX_REQUEST_BYTES
    leaves = [
        Leaf(View.tensor(name, (elements,), F4), (elements,), F4, whole)
        for name, elements, whole in (
            ("a", 10, [(((0, 10),),)]),
            ("b", limit // 4, [(((0, limit // 4),),)]),
            ("c", 5, [(((0, 5),),)]),
        )
    ]
    places = Places([("a", 40), ("b", limit), ("c", 20)], per_file=3)
    (cost,) = restore_plan(leaves, places.locate, ["f"], max_gap_bytes=0, threads=1, process_count=1).processes
    assert cost.num_requests == 2
    expected, _ = planned(leaves, places, 0, 0)
    assert [(extent.begin, extent.end) for extent in expected.extents] == [
        (100, 100 + limit),
        (100 + limit, 160 + limit),
    ]
    assert [extent.parts for extent in expected.extents] == [
        ((0, 0, 40), (1, 0, limit - 40)),
        ((1, limit - 40, 40), (2, 0, 20)),
    ]
    assert isinstance(expected, plan.TransferPlan)


def test_totals_and_uneven_shards():
    view = View.tensor("w", (5, 2), F4)
    held = [(((0, 3), (0, 2)),), (((3, 5), (0, 2)),)]
    report = restore_plan(
        [Leaf(view, (5, 2), F2, held)], lambda name: (0, 8), ["f"], max_gap_bytes=0, threads=2, process_count=2
    )
    assert (report.total_params, report.total_bytes, report.num_arrays) == (10, 20, 1)
    assert (report.largest_shard.params, report.smallest_shard.params) == (6, 4)
    assert (report.largest_shard.nbytes, report.smallest_shard.nbytes) == (12, 8)
    decoded = json.loads(report.to_json())
    assert decoded["total_params"] == 10
    assert [process["needed_bytes"] for process in decoded["processes"]] == [24, 16]
    assert decoded["processes"][0]["over_read"] == 1.0
    assert decoded["processes"][0]["files"][0]["file"] == "f"


def test_nothing_to_restore():
    report = restore_plan([], lambda name: (0, 0), [], max_gap_bytes=0, threads=2, process_count=1)
    assert (report.total_params, report.largest_shard.params) == (0, 0)
    (cost,) = report.processes
    assert (cost.read_bytes, cost.over_read) == (0, 1.0)
