"""The demo's page: what was read, to scale, and safe with hostile names."""

import base64
import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import save_file

from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.cli.demo import drawn
from orbax_safetensors.cli.demo_worker import requested, union
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Block, Location, transfer_plan
from tests.support.pages import HOSTILE, Page

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: tuple(sorted(pair))), max_size=8)


@pytest.fixture
def restored(tmp_path):
    """A file of which process 0 read the first half, process 1 the rest, and both the last ten bytes."""
    save_file({"a": np.zeros((8, 8), np.float32), HOSTILE: np.zeros(24, np.uint8)}, tmp_path / "a.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    start, end = checkpoint.files[0].header.data_start, checkpoint.files[0].header.file_bytes
    ranges = [[[start, start + 140], [end - 10, end]], [[start + 140, end]]]
    reports = [
        {"process": process, "shards": 8, "needed_bytes": 75, "planned_bytes": 150, "measured_bytes": 150,
         "ranges": {"0": ranges[process]}}
        for process in range(2)
    ]  # fmt: skip
    return checkpoint, reports


def data_of(text):
    """The page's numbers, with bytes by process and stretch."""
    data = json.loads(Page(text).data)
    nbytes = np.diff(data["files"][0]["cuts"])
    for key in ("read", "needed"):
        shares = np.frombuffer(base64.b64decode(data[key]), "<u2").reshape(2, -1) / data["unit"]
        data[key] = shares * nbytes
    return data


def test_boxes_hold_what_was_read(restored):
    data = data_of(drawn(*restored, []))
    cuts = np.array(data["files"][0]["cuts"]) - data["files"][0]["cuts"][0]
    at = cuts[:-1]  # stretches are single bytes here
    assert (np.diff(cuts) == 1).all()
    assert np.flatnonzero(data["read"][0]).tolist() == [*range(140), *range(270, 280)]
    assert np.flatnonzero(data["read"][1]).tolist() == at[140:].tolist()
    assert data["read"].sum() == pytest.approx(290)
    assert data["needed"].sum() == pytest.approx(145)


def test_a_name_is_text_and_nothing_else(restored):
    page = Page(drawn(*restored, []))
    assert page.tags.count("script") == 2
    assert HOSTILE.replace("\x1b", "\\x1b") in json.loads(page.data)["tensors"][-1]


def test_the_verdict_is_shown(restored):
    assert '<p class="good">All bits are equal: 16 shards' in drawn(*restored, [])
    text = drawn(*restored, ["process 1: <two> of 8 shards differ"])
    assert '<p class="bad">process 1: &lt;two&gt; of 8 shards differ</p>' in text
    assert "All bits are equal" not in text


def bytes_of(ranges):
    return {at for begin, end in ranges for at in range(begin, end)}


@given(RANGES)
def test_union(ranges):
    united = union(ranges).tolist()
    assert bytes_of(united) == bytes_of(ranges)
    flat = [at for pair in united for at in pair]
    assert flat == sorted(set(flat))  # in order, none touches another


def test_what_a_plan_requests():
    view = View.tensor("t", (64, 100), np.dtype(np.uint8))
    rows = Block(view, ((0, 8), (0, 100)), (8, 100), view.dtype)
    columns = Block(view, ((32, 64), (90, 100)), (32, 10), view.dtype)
    plan = transfer_plan([rows, columns], lambda _: Location(3, 1000, view.dtype), max_gap_bytes=0)
    ranges = requested(plan)
    assert list(ranges) == [3]
    assert sum(end - begin for begin, end in ranges[3]) == plan.moved_bytes
    expected = [(1000, 1800), *((1000 + row * 100 + 90, 1000 + row * 100 + 100) for row in range(32, 64))]
    assert bytes_of(ranges[3]) == bytes_of(expected)
