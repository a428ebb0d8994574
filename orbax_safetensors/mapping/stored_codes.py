"""A quantised tensor as it is stored: a row of `mapping.formats`, and what lies where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.encoding import Encoding, Order, Parameter, Role
from orbax_safetensors.mapping.formats import Format
from orbax_safetensors.mapping.quantization_config import Scheme, Settings
from orbax_safetensors.mapping.quantized_tensor import Quantized

StoredTypes = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype as spelled in a header
Read = Callable[[str], bytes]  # the data of a small tensor by its name

WORD_BITS = 32
BITS = (2, 4, 8)  # of codes that do not run over the ends of words
_SAYS = {Role.ZERO: "codes are asymmetric", Role.GROUP: "groups are permuted"}


def ended(name: str, ending: str, other: str) -> str:
    """Return `name` with another ending."""
    return name[: len(name) - len(ending)] + other


class StoredCodes:
    """One quantised tensor: a row of the formats, and what is stored."""

    def __init__(
        self,
        row: Format,
        name: str,
        codes: str,
        names: Mapping[Role, str],
        stored: StoredTypes,
        settings: Settings,
        read: Read,
    ) -> None:
        self.row, self.name, self.codes, self.names = row, name, codes, names
        self.stored, self.settings, self.read = stored, settings, read
        self.found = stored[codes][0]
        self.shapes = {role: stored[name][0] for role, name in names.items()}
        self.formats = {each.role: each for each in row.parameters}
        self.dtypes = {role: DTYPES[self.formats[role].meaning or stored[name][1]] for role, name in names.items()}

    def check_required(self, scheme: Scheme) -> None:
        """Raise `MappingError` if something is not stored that the config says to be there."""
        for role in scheme.required - self.names.keys():
            endings = [ending for each in self.row.parameters if each.role is role for ending in each.endings]
            names = [repr(ended(self.codes, self.row.codes, ending)) for ending in endings]
            raise MappingError(
                f"{self.codes!r}: expected {' or '.join(names) or 'another format'}, because {_SAYS[role]} "
                f"according to quantization_config, found {'no such tensor' if names else self.row.name}"
            )

    def expect(self, role: Role, shape: tuple[int, ...]) -> None:
        """Raise `MappingError` if a parameter has another shape."""
        if self.shapes[role] != shape:
            raise MappingError(
                f"{self.names[role]!r}: expected shape {shape} for {self.codes!r} of shape {self.found}, "
                f"found {self.shapes[role]}"
            )

    def encoding(
        self, shape: tuple[int, ...], bits: int, values: str, parameters: Sequence[Parameter], **others: Any
    ) -> Encoding:
        """Return how the tensor is stored."""
        return _encoding(shape, bits, values, tuple(parameters), self.row.order, final=self.row.final, **others)

    def quantized(
        self,
        encoding: Encoding,
        shape: tuple[int, ...],
        unfolded: tuple[int, ...],
        axes: tuple[int, ...],
        kept: tuple[int, ...],
    ) -> Quantized:
        """Return the tensor as models see it, see `Quantized`."""
        names = tuple(self.names[parameter.role] for parameter in encoding.parameters)
        label = self.row.name.format(bits=encoding.bits)
        return Quantized(self.name, label, self.codes, names, encoding, shape, unfolded, axes, kept)


@lru_cache
def _encoding(
    shape: tuple[int, ...], bits: int, values: str, parameters: tuple[Parameter, ...], order: Order, **others: Any
) -> Encoding:
    """Return an encoding: the same object for all tensors with equal arguments."""
    return Encoding(shape, bits, values, parameters, order, **others)
