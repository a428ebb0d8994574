"""PyTorch's sharded files: pieces of tensors put together, and every way in which they do not fit."""

import itertools

import jax
import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.checkpoint import read
from orbax_safetensors.geometry.box import Box
from tests.support.files import write
from tests.support.sharded_files import COLUMNS, GRID, PIECES, ROWS, WHOLE, write_pieces


@pytest.mark.both_devices
def test_pieces_make_whole_tensors(tmp_path, mesh):
    write_pieces(tmp_path, PIECES)
    handler = ost.SafetensorsHandler()
    restored = handler.restore(epath.Path(tmp_path), ost.SafetensorsRestore())
    assert sorted(restored) == sorted(WHOLE)
    for name, array in WHOLE.items():
        assert restored[name].shape == array.shape
        assert restored[name].tobytes() == array.tobytes()
    specs = {"rows": P("x"), "grid": P("x", "y")}
    item = {
        name: jax.ShapeDtypeStruct(WHOLE[name].shape, WHOLE[name].dtype, sharding=NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    restored = handler.restore(epath.Path(tmp_path), ost.SafetensorsRestore(item=item, partial_restore=True))
    for name in specs:
        assert np.asarray(restored[name]).tobytes() == WHOLE[name].tobytes()
    assert ost.verify(tmp_path) == []
    checkpoint = ost.open_checkpoint(tmp_path)
    assert checkpoint.nbytes == sum(array.nbytes for array in WHOLE.values())
    plan = ost.plan_restore(tmp_path, {"rows": np.zeros((10, 6), np.float32)})
    assert plan.processes[0].read_bytes == ROWS.nbytes


def changed(change):
    pieces = [list(own) for own in PIECES]
    change(pieces)
    return pieces


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (changed(lambda p: p.pop(1)), r"'(rows|columns|grid)': expected pieces that make up shape .* found \d+ of its"),
        (changed(lambda p: p[0].__setitem__(0, ("rows", (0, 0), ROWS[:5]))), r"'rows': .* overlap, .* \(4, 0\) on"),
        (changed(lambda p: p[2].append(("columns", (0, 3), COLUMNS[:, :1]))), r"'columns': .* overlap, .* \(0, 3\) on"),
        (
            changed(lambda p: p[1].__setitem__(0, ("rows", (4, 0), ROWS[4:].view("i4")))),
            "'rows': expected a piece of 2 dimensions of F32, found shape .* of I32",
        ),
        (
            changed(lambda p: p[1].__setitem__(0, ("rows", (4,), ROWS[4, :]))),
            "'rows': expected a piece of 2 dimensions",
        ),
        (changed(lambda p: p[1].__setitem__(0, ("rows", (4, 0, 0), ROWS[4:]))), "expected 2 saved_offsets"),
        (changed(lambda p: p[1].__setitem__(0, ("rows", (-4, 0), ROWS[4:]))), "expected 2 saved_offsets"),
        (changed(lambda p: p[1].__setitem__(0, ("rows", ("4", 0), ROWS[4:]))), "expected 2 saved_offsets"),
    ],
)
def test_pieces_that_do_not_fit(tmp_path, pieces, message):
    write_pieces(tmp_path, pieces)
    with pytest.raises(ost.SafetensorsError, match=message):
        ost.open_checkpoint(tmp_path)
    assert ost.verify(tmp_path)


SIDES = st.tuples(st.integers(0, 4), st.integers(1, 3)).map(lambda side: (side[0], sum(side)))


@given(st.integers(0, 3).flatmap(lambda rank: st.lists(st.tuples(*[SIDES] * rank).map(Box), max_size=6)))
def test_overlap_is_found(boxes):
    held = [set(itertools.product(*(range(*side) for side in box))) for box in boxes]
    found = read._two_that_overlap(boxes)
    assert (found is None) == (sum(map(len, held)) == len(set().union(*held)))
    if found is not None:
        assert set.intersection(*(held[boxes.index(box)] for box in found))


def test_another_version(tmp_path):
    write_pieces(tmp_path, PIECES, version="2.0")
    with pytest.raises(ost.HeaderError, match=r"expected DCP_VERSION '1\.0' beside DCP_SHARDING_INFO, found '2\.0'"):
        ost.open_checkpoint(tmp_path)


@pytest.mark.parametrize("information", ["", "[]", "{", '{"a": 1}', '{"a": {}}', "{}"])
def test_sharding_info_that_is_not_valid(tmp_path, information):
    metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": information}
    write(tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"a": ROWS}, metadata)
    with pytest.raises(ost.HeaderError, match="DCP_SHARDING_INFO"):
        ost.open_checkpoint(tmp_path)


def test_a_single_piece_that_is_not_the_first(tmp_path):
    write_pieces(tmp_path, [[("rows", (4, 0), ROWS[4:])]])
    with pytest.raises(ost.IndexFileError, match=r"'rows': .* found \d+ of its \d+ elements"):
        ost.open_checkpoint(tmp_path)


def test_a_tensor_may_be_called_like_a_piece(tmp_path):
    write_pieces(tmp_path, changed(lambda p: p[0].append(("rows piece 1", (0, 0), GRID))))
    restored = ost.SafetensorsHandler().restore(epath.Path(tmp_path))
    assert restored["rows piece 1"].tobytes() == GRID.tobytes()
    assert restored["rows"].tobytes() == ROWS.tobytes()


@pytest.mark.parametrize("kept", [[0, 1, 3], [3]])
def test_a_file_is_missing_before_an_empty_piece(tmp_path, kept):
    """Five rows over four ranks: the last has none, and says so at the end of the tensor."""
    rows = [
        ("rows", (0, 0), ROWS[:2]),
        ("rows", (2, 0), ROWS[2:4]),
        ("rows", (4, 0), ROWS[4:5]),
        ("rows", (5, 0), ROWS[:0]),
    ]
    write_pieces(tmp_path, [[rows[number]] for number in kept])
    with pytest.raises(ost.IndexFileError, match=r"'rows': expected pieces that make up shape .* of its \d+ elements"):
        ost.open_checkpoint(tmp_path)
