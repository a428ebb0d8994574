"""The report counts exactly what `transfer_plan` plans, for whatever views and shardings."""

import contextlib
import itertools
import json
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.cost import counter
from orbax_safetensors.cost.counter import ShardedLeaf
from orbax_safetensors.cost.restore import LeafOverRead, restore_plan
from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry import coalesce
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.encoding import Encoding
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer import plan
from orbax_safetensors.transfer.plan import Block, Location, gather_at, transfer_plan
from tests.support.strategies import examples
from tests.support.views import boxes, compositions

F4, F2 = np.dtype("f4"), np.dtype("f2")
FLOAT8, FLOAT32 = DTYPES["F8_E4M3"], DTYPES["F32"]


class Places:
    """Tensors of `(name, number of elements, dtype or encoding)` one after the other in files of `per_file` each."""

    def __init__(self, tensors, per_file):
        self.places, end = {}, 0
        for number, (name, elements, stored) in enumerate(tensors):
            if number % per_file == 0:
                end = 100
            if isinstance(stored, Encoding):
                self.places[name] = Location(number // per_file, end, F4, stored)
                end += elements * stored.codes.bits // 8
            else:
                self.places[name] = Location(number // per_file, end, stored)
                end += elements * stored.itemsize
        self.files = [f"f{number}" for number in range(-(-len(tensors) // per_file))]

    def locate(self, name):
        return self.places[name]


def planned(leaves, places, process, gap, file=None):
    """The plan of a process, or the part of it that concerns one file."""
    blocks = []
    for leaf in leaves:
        view = leaf.view
        if file is not None:
            kept = (p for p in view.pieces if p.tensor is not None and places.locate(p.tensor).file == file)
            view = replace(view, pieces=tuple(kept))
        if leaf.readers is None or process in leaf.readers:
            for box in dict.fromkeys(leaf.boxes[process]):
                blocks.append(Block(view, view.clipped(box), box.shape, leaf.dtype))
    return transfer_plan(blocks, places.locate, gap)


def check(leaves, places, gap, process_count):
    """Compares the report with the plans, process by process and file by file."""
    counted = restore_plan(
        leaves, places.locate, places.files, max_gap_bytes=gap, threads=3, process_count=process_count
    )
    for process, cost in enumerate(counted.processes):
        expected = planned(leaves, places, process, gap)
        assert cost.read_bytes == expected.moved_bytes
        assert cost.needed_bytes == expected.needed_bytes
        assert cost.num_requests == expected.num_requests
        assert cost.staging_bytes == 3 * expected.window_bytes
        assert cost.destination_bytes == sum(
            prod(b - a for a, b in box) * leaf.dtype.itemsize
            for leaf in leaves
            for box in dict.fromkeys(leaf.boxes[process])
        )
        by_file = {file.file: file for file in cost.files}
        for number, file in enumerate(places.files):
            expected = planned(leaves, places, process, gap, number)
            if expected.num_requests:
                found = by_file.pop(file)
                assert found.read_bytes == expected.moved_bytes
                assert found.needed_bytes == expected.needed_bytes
                assert found.num_requests == expected.num_requests
        assert not by_file
    return counted


@examples(200)
@given(st.data(), st.sampled_from([0, 64]), st.integers(1, 3))
def test_the_report_counts_what_is_planned(data, gap, per_file):
    leaves, tensors = [], []
    for number in range(data.draw(st.integers(1, 4))):
        made = data.draw(compositions())
        renamed = {name: f"{number}.{name}" for name in made.stored}
        view = replace(made.view, pieces=tuple(p._replace(tensor=renamed[p.tensor]) for p in made.view.pieces))
        shape = tuple(size + data.draw(st.integers(0, 2)) for size in view.shape)
        held = [tuple(data.draw(st.lists(boxes(shape), min_size=1, max_size=3))) for _ in range(2)]
        leaves.append(ShardedLeaf(str(number), view, shape, data.draw(st.sampled_from([F4, F2])), held))
        tensors += [(renamed[name], array.size, F4) for name, array in made.stored.items()]
    check(leaves, Places(tensors, per_file), gap, process_count=2)


@dataclass
class Tree:
    """Leaves as models have them, stacked from many stored tensors, and these as `Places` takes them."""

    leaves: list = field(default_factory=list)
    tensors: list = field(default_factory=list)


@st.composite
def trees(draw, process_count, devices):
    """Up to three blocks of one or two kinds.

    A block has tensors of one shape, and one or two leaves that are stacked from all of them. Within a kind, blocks
    differ in how their elements are stored, in what some of their tensors are seen through, and in who reads them.
    """
    tree = Tree()
    kinds = draw(st.lists(kinds_of_blocks(), min_size=1, max_size=2))
    shardings = {}
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(kinds))
        rows, columns = kind.shape
        blocks = Encoding((rows, columns), draw(st.sampled_from([(2, 2), (1, 4), (3, columns)])), FLOAT8, FLOAT32)
        stored = draw(st.lists(st.sampled_from([F4, F4, F2, blocks]), min_size=1, max_size=2))
        names = [f"{number}.{'.'.join(map(str, index))}" for index in itertools.product(*map(range, kind.counts))]
        own = [(name, rows * columns, stored[at % len(stored)]) for at, name in enumerate(names)]
        tree.tensors += own if draw(st.booleans()) else own[::-1]
        for way, words in enumerate(kind.ways):
            first = draw(st.lists(st.sampled_from(kind.first), min_size=1, max_size=2))
            views = []
            for at, name in enumerate(names):
                views.append(first[at % len(first)](View.tensor(name, kind.shape, F4)))
                for word in words:
                    with contextlib.suppress(MappingError):  # a reshape that is not affine is left out
                        views[-1] = word(views[-1])
            for count, join in zip(kind.counts[::-1], kind.joins, strict=True):
                views = [join(views[at : at + count]) for at in range(0, len(views), count)]
            view = draw(st.sampled_from(FINISHES))(views[0])
            shape = tuple(size + draw(st.sampled_from([0, 0, 0, 1])) for size in view.shape)
            if shape not in shardings or draw(st.integers(0, 3)) == 3:
                shardings[shape] = draw(dealt(shape, process_count, devices))
            readers = draw(st.sampled_from([None, None, frozenset([0])]))
            dtype = draw(st.sampled_from([F4, F4, F2]))
            tree.leaves.append(ShardedLeaf(f"{number}.{way}", view, shape, dtype, shardings[shape], readers))
    return tree


@dataclass
class Kind:
    """What blocks of one kind have in common.

    `shape` is that of their tensors, of which they have `counts`. For each leaf there are the words that all tensors
    are seen through in `ways`, after one of `first`. `joins` put them together, the last of `counts` first.
    """

    shape: tuple
    counts: list
    first: list
    ways: list
    joins: list


@st.composite
def kinds_of_blocks(draw):
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    return Kind(
        shape=(2 * draw(SIZES), 2 * draw(SIZES)),
        counts=counts,
        first=draw(st.sampled_from([WHOLE, WHOLE, EVERY_OTHER, PARTS])),
        ways=draw(st.lists(st.lists(st.sampled_from(WORDS), max_size=2), min_size=1, max_size=2)),
        joins=[draw(st.sampled_from(JOINS)) for _ in counts],
    )


def halves(view):
    """Both halves of the leading dimension the other way round: two pieces of each tensor."""
    half = view.shape[0] // 2
    return View.concatenate([view.slice(slice(half, None)), view.slice(slice(0, half))])


def heads(view):
    """As rotary embeddings are stored: the leading dimension split in two and its parts transposed."""
    return view.reshape((2, -1, view.shape[1])).transpose((1, 0, 2)).reshape(view.shape)


def scaled(view):
    return view.scale(2.0)


def same(view):
    return view


SIZES = st.sampled_from([1, 2, 3, 4, 6])
WHOLE = [same, same, same, scaled, halves]
EVERY_OTHER = [lambda view: view.slice(slice(0, None, 2)), lambda view: view.slice(slice(1, None, 2))]
PARTS = [lambda view: view.slice(slice(0, 1)), lambda view: view.slice(slice(1, 2))]
WORDS = [View.transpose, View.transpose, halves, heads, scaled, lambda view: view.slice(slice(None), slice(1, None))]
JOINS = [View.concatenate, View.stack, lambda views: View.concatenate(views, 1), lambda views: View.stack(views, 1)]
FINISHES = [
    same,
    same,
    lambda view: view.offset(1.0),
    lambda view: view.pad(tuple(size + 1 for size in view.shape)),
    lambda view: View.concatenate([view.slice(slice(0, 1)), view]),
    View.transpose,
]


@st.composite
def dealt(draw, shape, process_count, devices):
    """The boxes of each process as a `NamedSharding` over a mesh of two axes makes them."""
    mesh = draw(st.sampled_from([(a, devices // a) for a in range(1, devices + 1) if devices % a == 0]))
    over = [()] * len(shape)
    for axis in draw(st.sampled_from([(0, 1), (0, 1), (0,), (1,), ()])):
        over[draw(st.integers(0, len(shape) - 1))] += (axis,)
    boxes = []
    for place in np.ndindex(*mesh):
        box = []
        for size, axes in zip(shape, over, strict=True):
            block, blocks = 0, 1
            for axis in axes:
                block, blocks = block * mesh[axis] + place[axis], blocks * mesh[axis]
            length = -(-size // blocks)
            box.append((min(block * length, size), min((block + 1) * length, size)))
        boxes.append(Box(box))
    each = devices // process_count
    return [tuple(boxes[at : at + each]) for at in range(0, devices, each)]


@examples(300)
@given(
    st.data(), st.sampled_from([0, 16, 64]), st.integers(1, 9), st.sampled_from([1, 2, 4]), st.sampled_from([4, 6, 8])
)
def test_stacks_of_many_tensors_on_a_mesh(data, gap, per_file, process_count, devices):
    devices = max(devices // process_count, 1) * process_count
    tree = data.draw(trees(process_count, devices))
    places = Places(tree.tensors, per_file)
    counted = check(tree.leaves, places, gap, process_count)
    assert {one.name: one for one in counted.over_reads} == over_reads(tree.leaves, places, gap, process_count)
    wasted = [one.read_bytes - one.needed_bytes for one in counted.over_reads]
    assert wasted == sorted(wasted, reverse=True)


def over_reads(leaves, places, gap, process_count):
    """The report's, by name, from the plans of one tensor at a time."""
    figures = {}
    for tensor in places.places:
        used = [leaf for leaf in leaves if tensor in leaf.view.tensors]
        only = [
            leaf._replace(view=replace(leaf.view, pieces=tuple(p for p in leaf.view.pieces if p.tensor == tensor)))
            for leaf in used
        ]
        for process in range(process_count if used else 0):
            expected = planned(only, places, process, gap)
            needed, read = figures.get(used[0].name, (0, 0))
            figures[used[0].name] = needed + expected.needed_bytes, read + expected.moved_bytes
    return {name: LeafOverRead(name, needed, read) for name, (needed, read) in figures.items() if read > 1.1 * needed}


def experts(name, experts, layers, rows, columns):
    """A stack `(experts, layers, columns, rows)` of transposed tensors, and what they are."""
    names = [[f"{name}.{layer}.{expert}" for layer in range(layers)] for expert in range(experts)]
    view = View.stack([View.stack([View.tensor(one, (rows, columns), F4).T for one in own]) for own in names])
    return view, [(names[expert][layer], rows * columns, F4) for layer in range(layers) for expert in range(experts)]


def split(shape, axis, count):
    """The boxes of `count` processes that each hold one block of dimension `axis`."""
    length = shape[axis] // count
    whole = [(0, size) for size in shape]
    return [(Box((*whole[:axis], (at * length, (at + 1) * length), *whole[axis + 1 :])),) for at in range(count)]


def test_tensors_of_one_shape_that_are_stored_or_used_differently_are_counted_apart():
    shape, encoding = (8, 4), Encoding((8, 4), (3, 4), FLOAT8, FLOAT32)
    stored = {"plain": F4, "plain too": F4, "scaled": F4, "narrow": F2, "encoded": encoding}
    views = {name: View.tensor(name, shape, F4) for name in stored}
    views["scaled"] = views["scaled"].scale(2.0)
    places = Places([(name, 32, how) for name, how in stored.items()], 5)
    # The second of four blocks cuts across two of the encoding's; a process with two asks for them at once.
    four = split(shape, 0, 4)
    for held in split(shape, 0, 1), four, [four[0] + four[1], four[2] + four[3]]:
        check([ShardedLeaf(name, view, shape, F4, held) for name, view in views.items()], places, 0, len(held))


def test_pieces_of_one_shape_that_boxes_cut_differently_are_counted_apart():
    # The second of three processes reads the end of one tensor and the beginning of the next, which touch.
    view = View.concatenate([View.tensor(name, (3, 2), F4) for name in "ab"])
    places = Places([("a", 6, F4), ("b", 6, F4)], 2)
    counted = check([ShardedLeaf("w", view, (6, 2), F4, split((6, 2), 0, 3))], places, 0, 3)
    assert [cost.num_requests for cost in counted.processes] == [1, 1, 1]
    # Each of four processes reads one of four tensors.
    view, tensors = experts("e", 2, 2, 3, 2)
    held = [(Box(((e, e + 1), (layer, layer + 1), (0, 2), (0, 3))),) for e in (0, 1) for layer in (0, 1)]
    counted = check([ShardedLeaf("e", view, view.shape, F4, held)], Places(tensors, 1), 0, 4)
    assert [cost.files[0].file for cost in counted.processes] == ["f0", "f2", "f1", "f3"]


def test_dimensions_of_more_elements_than_32_bits_count():
    size = 5 * 10**9
    view = View.concatenate([View.tensor(name, (size,), F4) for name in "ab"])
    held = split(view.shape, 0, 4)
    counted = check([ShardedLeaf("w", view, view.shape, F4, held)], Places([("a", size, F4), ("b", size, F4)], 1), 0, 4)
    assert [[file.file for file in cost.files] for cost in counted.processes] == [["f0"], ["f0"], ["f1"], ["f1"]]


def test_the_work_does_not_grow_with_the_number_of_tensors(monkeypatch):
    calls = []
    monkeypatch.setattr(counter, "gather_at", lambda *arguments: calls.append(arguments) or gather_at(*arguments))
    view, tensors = experts("e", 32, 10, 16, 8)
    for axis, at_most in ((0, 2), (1, 2), (2, 1), (3, 1)):
        calls.clear()
        count = 10 if axis == 1 else 8
        check([ShardedLeaf("e", view, view.shape, F4, split(view.shape, axis, count))], Places(tensors, 40), 0, count)
        assert len(calls) <= at_most * count


def test_leaves_that_force_over_reads_are_named_the_most_wasteful_first():
    def leaf(name, axis, count=4):
        view, tensors = experts(name, 4, 2, 8, 4 * count)
        return ShardedLeaf(name, view, view.shape, F4, split(view.shape, axis, 4)), tensors

    made = [leaf("whole experts", 0), leaf("columns", 2), leaf("rows", 3), leaf("more columns", 2, count=8)]
    leaves = [one for one, _ in made]
    # Tensors that an earlier leaf uses: the second of them adds nothing of its own.
    leaves.append(leaves[1]._replace(name="columns again"))
    places = Places([tensor for _, tensors in made for tensor in tensors], 5)
    counted = restore_plan(leaves, places.locate, places.files, max_gap_bytes=1000, threads=1, process_count=4)
    nbytes = 4 * 2 * 8 * 16 * 4  # of the narrower ones; a process reads every tensor from its first to its last column
    columns, wide = (
        LeafOverRead("columns", nbytes, 8 * 4 * 4 * (7 * 16 + 4)),
        LeafOverRead("more columns", 2 * nbytes, 8 * 4 * 4 * (7 * 32 + 8)),
    )
    assert counted.over_reads == (wide, columns)
    assert columns.over_read == columns.read_bytes / nbytes > 3
    (first, _) = json.loads(counted.to_json())["over_reads"]
    assert first == {
        "name": "more columns",
        "needed_bytes": wide.needed_bytes,
        "read_bytes": wide.read_bytes,
        "over_read": wide.over_read,
    }
    assert sum(cost.read_bytes - cost.needed_bytes for cost in counted.processes) == sum(
        one.read_bytes - one.needed_bytes for one in counted.over_reads
    )


def test_ranges_of_neighbouring_tensors_are_joined_and_long_ones_cut():
    limit = coalesce.MAX_REQUEST_BYTES
    sizes = (("a", 10), ("b", limit // 4), ("c", 5))
    leaves = [
        ShardedLeaf(name, View.tensor(name, (elements,), F4), (elements,), F4, [(Box.whole((elements,)),)])
        for name, elements in sizes
    ]
    places = Places([(name, elements, F4) for name, elements in sizes], per_file=3)
    (cost,) = restore_plan(leaves, places.locate, ["f"], max_gap_bytes=0, threads=1, process_count=1).processes
    assert cost.num_requests == 2
    expected = planned(leaves, places, 0, 0)
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
    held = [(Box(((0, 3), (0, 2))),), (Box(((3, 5), (0, 2))),)]
    counted = restore_plan(
        [ShardedLeaf("w", view, (5, 2), F2, held)],
        lambda name: Location(0, 8, F4),
        ["f"],
        max_gap_bytes=0,
        threads=2,
        process_count=2,
    )
    assert (counted.total_params, counted.total_bytes, counted.num_arrays) == (10, 20, 1)
    assert (counted.largest_shard.params, counted.smallest_shard.params) == (6, 4)
    assert (counted.largest_shard.nbytes, counted.smallest_shard.nbytes) == (12, 8)
    decoded = json.loads(counted.to_json())
    assert decoded["total_params"] == 10
    assert [process["needed_bytes"] for process in decoded["processes"]] == [24, 16]
    assert decoded["processes"][0]["over_read"] == 1.0
    assert decoded["processes"][0]["files"][0]["file"] == "f"
    assert decoded["over_reads"] == []


def test_nothing_to_restore():
    counted = restore_plan([], lambda name: Location(0, 0, F4), [], max_gap_bytes=0, threads=2, process_count=1)
    assert (counted.total_params, counted.largest_shard.params) == (0, 0)
    (cost,) = counted.processes
    assert (cost.read_bytes, cost.over_read) == (0, 1.0)
