"""Views of tensors as views of the pieces of them that they cover."""

import numpy as np
import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.geometry.pieces import TensorPiece, in_pieces
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.strided_copy import elements

F4 = np.dtype(np.float32)


def filled(view, tensors):
    out = np.zeros(view.shape, F4)
    for name, copy, _ in view.copies(tuple((0, size) for size in view.shape), view.shape):
        source, dense = elements(
            copy, np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8), F4, out.reshape(-1).view(np.uint8), F4
        )
        np.copyto(dense, source)
    return out


def check(views, tensors):
    """The views are the same of the pieces; returns these."""
    shapes = {name: array.shape for name, array in tensors.items()}
    of_pieces, pieces = in_pieces(views, shapes)
    held = {name: tensors[piece.tensor][tuple(slice(*sides) for sides in piece.box)] for name, piece in pieces.items()}
    for view, other in zip(views, of_pieces, strict=True):
        assert filled(other, held).tobytes() == filled(view, tensors).tobytes()
    return sorted(pieces.values())


def values(*shape):
    return np.arange(np.prod(shape), dtype=F4).reshape(shape)


def test_shards_that_touch_are_one_piece():
    tensors = {"a": values(8, 12)}
    whole = View.tensor("a", (8, 12), F4)
    columns = [whole.slice(slice(None), slice(at, at + 3)) for at in (3, 6)]
    assert check(columns, tensors) == [TensorPiece("a", ((0, 8), (3, 9)))]
    corners = [whole.slice(slice(at, at + 4), slice(at, at + 4)) for at in (0, 4)]
    assert check(corners, tensors) == [TensorPiece("a", ((0, 4), (0, 4))), TensorPiece("a", ((4, 8), (4, 8)))]
    assert check([whole], tensors) == [TensorPiece("a", ((0, 8), (0, 12)))]
    assert check([whole.slice(slice(2, 3))], tensors) == [TensorPiece("a", ((2, 3), (0, 12)))]


def test_leaves_of_other_shapes_than_their_tensors():
    tensors = {"a": values(8, 6), "b": values(8, 6), "s": values()}
    a, b = (View.tensor(name, (8, 6), F4) for name in "ab")
    stacked = View.stack([a.T, b.T]).slice(slice(None), slice(2, 4))
    box = ((0, 8), (2, 4))
    assert check([stacked], tensors) == [TensorPiece("a", box), TensorPiece("b", box)]
    heads = a.reshape((2, 4, 6)).transpose((2, 0, 1)).slice(slice(0, 3), slice(1, 2))
    assert check([heads], tensors) == [TensorPiece("a", ((4, 8), (0, 3)))]
    assert check([a.reshape((48,))], tensors) == [TensorPiece("a", ((0, 8), (0, 6)))]
    assert check([View.tensor("s", (), F4)], tensors) == [TensorPiece("s", ())]


def test_copies_that_alternate_are_one_piece():
    tensors = {"a": values(8, 6)}
    a = View.tensor("a", (8, 6), F4)
    halves = View.concatenate([a.slice(slice(0, 8, 2)), a.slice(slice(1, 8, 2))]).slice(slice(None), slice(0, 2))
    assert check([halves], tensors) == [TensorPiece("a", ((0, 8), (0, 2)))]


def test_what_is_no_box():
    a = View.tensor("a", (8, 6), F4)
    with pytest.raises(MappingError, match="'a': the part that one process holds is not made of rectangular blocks"):
        in_pieces([a.slice(slice(0, 8, 2))], {"a": (8, 6)})
    with pytest.raises(MappingError, match=r"'a'"):
        in_pieces([a.reshape((48,)).slice(slice(3, 12))], {"a": (8, 6)})
    with pytest.raises(MappingError, match=r"'a': the part that one process holds ends in the middle of rows"):
        in_pieces([a.reshape((48,)).slice(slice(3, 7))], {"a": (8, 6)})


def test_constants_stay():
    tensors = {"a": values(2, 3)}
    padded = View.concatenate([View.tensor("a", (2, 3), F4), View.full((1, 3), 1.0)])
    views, pieces = in_pieces([padded], {"a": (2, 3)})
    assert [piece.tensor for piece in views[0].pieces] == ["0/a", None]
    assert list(pieces.values()) == [TensorPiece("a", ((0, 2), (0, 3)))]
    assert tensors
