"""Parts and moves, carried out by NumPy on arrays for devices: each byte is read once, and all get their shards."""

from math import inf, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.geometry.exchange import SLIGHT_PADDING, exchange
from tests.support.strategies import examples


def linear(sizes, coordinates, axes):
    """The place of a device along several axes, of which the first changes least."""
    place = 0
    for axis in axes:
        place = place * sizes[axis] + coordinates[axis]
    return place


def block(array, cuts, sizes, coordinates):
    """What a device holds of an array whose dimensions the axes in `cuts` cut evenly."""
    for dimension, axes in enumerate(cuts):
        pieces = np.split(array, prod(sizes[axis] for axis in axes), axis=dimension)
        array = pieces[linear(sizes, coordinates, axes)]
    return array


def moved(made, sizes, held, move):
    """What devices hold after a move, and how many elements each of them received."""
    out, received = {}, {}
    for device in held:
        group = sorted(
            (
                other
                for other in held
                if all(other[axis] == device[axis] for axis in range(len(sizes)) if axis not in move.axes)
            ),
            key=lambda other: linear(sizes, other, move.axes),
        )
        pieces = [held[other] for other in group]
        if move.destination is not None:
            own = linear(sizes, device, move.axes)
            pieces = [np.split(piece, len(group), axis=move.destination)[own] for piece in pieces]
        out[device] = np.concatenate(pieces, axis=move.source)
        received[device] = sum(piece.size for piece, other in zip(pieces, group, strict=True) if other != device)
    return out, received


def check(shape, axes, sizes, order, padding, owners):
    made = exchange(shape, axes, sizes, order, padding)
    assert prod(made.sizes) == prod(sizes) == made.devices
    array = np.arange(prod(shape)).reshape(shape)
    padded = np.full(made.padded, -1)
    padded[tuple(slice(size) for size in shape)] = array
    devices = list(np.ndindex(*made.sizes))
    # Parts in the order in which they follow one another, and who reads them.
    places = [tuple(int(at) for at in np.unravel_index(position, made.sizes)) for position in made.positions()]
    parts = [block(padded, made.parts, made.sizes, place) for place in places]
    assert sorted(made.positions()) == list(range(made.devices))
    readers = sorted(range(made.devices), key=lambda device: owners[device])
    held = {devices[reader]: part for reader, part in zip(readers, parts, strict=True)}
    received = dict.fromkeys(devices, 0)
    if made.sends(owners):
        sent = {devices[to]: held[devices[sender]] for sender, to in made.sends(owners)}
        assert len(sent) == made.devices
        received = {device: part.size for device, part in sent.items()}
        held = sent
    for move in made.moves:
        held, more = moved(made, made.sizes, held, move)
        received = {device: received[device] + more[device] for device in devices}
    factors = iter(range(len(made.sizes)))
    factors_of = []
    for size in sizes:
        own, count = [], 1
        while count < size:
            own.append(next(factors))
            count *= made.sizes[own[-1]]
        assert count == size
        factors_of.append(own)
    shards = [[factor for axis in entry for factor in factors_of[axis]] for entry in axes]
    for device in devices:
        found = held[device][
            tuple(slice(size) if not cut else slice(None) for size, cut in zip(shape, shards, strict=True))
        ]
        assert np.array_equal(found, block(array, shards, made.sizes, device))
        assert received[device] <= made.received(owners)
    assert max(received.values()) == made.received(owners) or not made.received(owners)
    return made, parts


@examples(300)
@given(st.data())
def test_every_device_gets_its_shard(data):
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=3))
    rank = data.draw(st.integers(0, 3))
    axes = [() for _ in range(rank)]
    for axis in data.draw(st.permutations(range(len(sizes)))):
        if rank and data.draw(st.booleans()):
            dimension = data.draw(st.integers(0, rank - 1))
            axes[dimension] = (*axes[dimension], axis)
    shape = tuple(prod(sizes[axis] for axis in entry) * data.draw(st.integers(1, 9)) for entry in axes)
    order = tuple(data.draw(st.permutations(range(rank))))
    processes = data.draw(st.sampled_from([count for count in (1, 2, 3, 4) if prod(sizes) % count == 0]))
    owners = data.draw(st.permutations([at % processes for at in range(prod(sizes))]))
    check(shape, axes, sizes, order, data.draw(st.sampled_from([SLIGHT_PADDING, inf])), owners)


@pytest.mark.parametrize(
    ("shape", "axes", "padded", "parts"),
    [
        ((64, 8), ((), ()), (64, 8), ((0, 1, 2), ())),  # replicated: everybody reads rows
        ((64, 8), ((), (0, 1)), (64, 8), ((0, 1, 2), ())),  # columns
        ((64, 8), ((1,), (0,)), (64, 8), ((1, 2, 0), ())),  # the axes that cut rows in the end stay there
        (
            (4, 64, 8),
            ((), (), (0, 1)),
            (4, 64, 8),
            ((1, 2), (0,), ()),
        ),  # few layers: both dimensions that are outermost
        ((151655, 8), ((), (0, 1)), (151656, 8), ((0, 1, 2), ())),  # a row more
        ((9, 64), ((), ()), (9, 64), ((), (0, 1, 2))),  # rather than seven rows more, columns
        ((), (), (), ()),
    ],
)
def test_parts_are_cut_where_storage_is_contiguous(shape, axes, padded, parts):
    order = tuple(range(len(shape)))[::-1]
    made, _ = check(shape, axes, (2, 4), order, SLIGHT_PADDING, [0] * 4 + [1] * 4)
    assert (made.padded, made.parts) == (padded, parts)


def test_a_process_reads_neighbours_whatever_the_order_of_devices():
    owners = [0, 1] * 4
    made, parts = check((64,), ((),), (8,), (0,), SLIGHT_PADDING, owners)
    assert [part[0] for part in parts] == list(range(0, 64, 8))
    # Device 1 has read part 4, and device 2 part 1.
    assert dict(made.sends(owners)) == {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}


def test_what_is_transposed_is_cut_along_its_rows_in_storage():
    made = exchange((64, 48), ((0,), ()), (8,), (0, 1), SLIGHT_PADDING)
    assert made.parts == ((), (0, 1, 2))
