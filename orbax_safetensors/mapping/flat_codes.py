"""bitsandbytes: codes of all elements one after the other, in blocks that go over the ends of rows."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format import strict_json
from orbax_safetensors.format.header import shown
from orbax_safetensors.geometry.encoding import Parameter, Role
from orbax_safetensors.mapping.quantized_tensor import Quantized
from orbax_safetensors.mapping.stored_codes import StoredCodes, ended

_LONGEST_BLOCK = 4096  # elements of bitsandbytes' longest block


class FlatCodes(StoredCodes):
    """Codes of a tensor without its shape, which another stored tensor has."""

    def flat(self) -> Quantized:
        """Return the tensor, whose blocks go over the ends of rows."""
        state = self._state()
        shape, size = tuple(state["shape"]), state["blocksize"]
        elements = prod(shape)
        blocks = -(-elements // size)
        if prod(self.found) != -(-elements // 2):
            raise MappingError(
                f"{self.codes!r}: expected {-(-elements // 2)} bytes for shape {shape}, found shape {self.found}"
            )
        self.expect(Role.SCALE, (blocks,))
        self.expect(Role.VALUES, (16,))
        every = (blocks, size)
        parameters = [
            Parameter(Role.SCALE, self.dtypes[Role.SCALE], (blocks, 1), (1, size)),
            Parameter(Role.VALUES, self.dtypes[Role.VALUES], (1, 16), (blocks, 0)),
        ]
        added = 0.0
        if Role.FACTOR in self.names:
            nested, offset = state.get("nested_blocksize"), state.get("nested_offset")
            if type(nested) is not int or not 0 < nested <= _LONGEST_BLOCK:
                raise MappingError(
                    f"{self.codes!r}: expected a nested_blocksize of 1 to {_LONGEST_BLOCK}, found {shown(nested)}"
                )
            if not isinstance(offset, int | float) or not abs(offset) <= float(np.finfo(np.float32).max):
                raise MappingError(f"{self.codes!r}: expected a float32 as nested_offset, found {shown(offset)}")
            self.expect(Role.FACTOR, (-(-blocks // nested),))
            self.expect(Role.SCALE_VALUES, (256,))
            parameters += [
                Parameter(Role.SCALE_VALUES, self.dtypes[Role.SCALE_VALUES], (1, 256), (blocks, 0)),
                Parameter(Role.FACTOR, self.dtypes[Role.FACTOR], (-(-blocks // nested), 1), (nested, size)),
            ]
            added = float(offset)
        encoding = self.encoding(
            every, 4, self.row.values, parameters, added=added, padding=prod(every) - 2 * prod(self.found)
        )
        return self.quantized(encoding, shape, (prod(every),), (0,), (elements,))

    def _state(self) -> dict[str, Any]:
        """Return what bitsandbytes says of a tensor, which no shape says: it stores a column of bytes."""
        names = [ended(self.codes, self.row.codes, ending) for ending in self.row.facts]
        stored = [name for name in names if name in self.stored]
        text = self.read(stored[0]) if stored else b""
        try:
            state = strict_json.loads(text)
            fits = (
                all(type(size) is int and size >= 0 for size in state["shape"])
                and type(state["blocksize"]) is int
                and 0 < state["blocksize"] <= _LONGEST_BLOCK
                and state["blocksize"] % 2 == 0
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            fits = False
        if not fits:
            raise MappingError(
                f"{self.codes!r}: expected its shape and blocksize in {' or '.join(map(repr, names))}, "
                f"found {shown(text)}"
            )
        return dict(state)
