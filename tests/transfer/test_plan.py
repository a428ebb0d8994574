"""What a plan says that it moves: the same in all, by file and by block."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Block, Location, transfer_plan
from tests.support.views import boxes, compositions

F4 = np.dtype("f4")


@given(data=st.data(), gap=st.sampled_from([0, 64]), most=st.sampled_from([32, 2**24]))
def test_files_and_blocks_sum_up_to_the_plan(data, gap, most):
    made = data.draw(compositions())
    blocks = [Block(made.view, box, box.shape, F4) for box in data.draw(st.lists(boxes(made.view.shape), max_size=4))]
    places, ends = {}, [100, 100]
    for number, (name, array) in enumerate(made.stored.items()):
        places[name] = Location(number % 2, ends[number % 2], F4)
        ends[number % 2] += array.nbytes
    plan = transfer_plan(blocks, places.__getitem__, gap, most)
    for traffic in (plan.files, plan.blocks()):
        assert sum(moved.needed_bytes for moved in traffic) == plan.needed_bytes
        assert sum(moved.moved_bytes for moved in traffic) == plan.moved_bytes
        assert sum(moved.num_requests for moved in traffic) == plan.num_requests
        assert [moved.number for moved in traffic] == sorted({moved.number for moved in traffic})
    assert all(moved.number < len(blocks) for moved in plan.blocks())


def test_requests_of_two_halves_of_a_tensor_count_for_both():
    whole = View.tensor("t", (1024,), np.dtype(np.uint8))
    halves = [whole.slice(slice(0, 512)), whole.slice(slice(512, 1024))]
    blocks = [Block(half, Box.whole(half.shape), half.shape, half.dtype) for half in halves]
    plan = transfer_plan(blocks, lambda _: Location(0, 0, np.dtype(np.uint8)), 0, 256)
    assert [moved.num_requests for moved in plan.blocks()] == [2, 2]
