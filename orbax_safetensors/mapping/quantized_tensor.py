"""`Quantized`: a tensor that is stored as codes and parameters, and the view that models have of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from orbax_safetensors.geometry.encoding import Encoding, Parameter, Role
from orbax_safetensors.geometry.view import View

_Sizes = tuple[int, ...]


class Quantized(NamedTuple):
    """A quantised tensor: the names of its stored tensors, and how they encode it.

    Models see elements in another order than the codes have: as `shape`, after they were `unfolded`, their dimensions
    put in the order of `axes`, and cut to the sizes `kept`. `dtype` is that of the elements if there is only one.
    """

    name: str
    format: str
    codes: str
    parameters: tuple[str, ...]
    encoding: Encoding
    shape: tuple[int, ...]
    unfolded: tuple[int, ...]
    axes: tuple[int, ...]
    kept: tuple[int, ...]
    dtype: np.dtype | None = None

    @property
    def stored(self) -> tuple[str, ...]:
        """Return the names of all stored tensors that are needed."""
        return self.codes, *self.parameters

    def renamed(self, name: str, codes: str, names: Mapping[Role, str]) -> Quantized:
        """Return the same for a tensor that is stored alike, with parameters under other `names`."""
        parameters = tuple([names[parameter.role] for parameter in self.encoding.parameters])
        return self._replace(name=name, codes=codes, parameters=parameters)

    @property
    def scales(self) -> str:
        """Return the name of the scales."""
        return self.parameters[0]

    def parameter(self, role: Role) -> tuple[str, Parameter] | None:
        """Return the parameter with a role, after its name; None if there is none."""
        named = zip(self.parameters, self.encoding.parameters, strict=True)
        return next((each for each in named if each[1].role is role), None)

    def view(self, dtype: np.dtype) -> View:
        """Return the tensor as models see it."""
        dtype = self.dtype or dtype
        view = _view(self.encoding.shape, self.unfolded, self.axes, self.kept, self.shape, dtype)
        return View(view.shape, dtype, tuple([piece._replace(tensor=self.name) for piece in view.pieces]))


@lru_cache
def _view(stored: _Sizes, unfolded: _Sizes, axes: _Sizes, kept: _Sizes, shape: _Sizes, dtype: np.dtype) -> View:
    """Return the view of a tensor without a name: a model has tens of thousands with few shapes."""
    view = View.tensor("", stored, dtype).reshape(unfolded).transpose(axes)
    return view.slice(*[slice(0, size) for size in kept]).reshape(shape)
