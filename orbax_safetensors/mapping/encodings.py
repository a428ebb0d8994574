"""From a row of `mapping.formats` and the shapes of what is stored to the `Encoding` of a quantised tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.format.header import shown
from orbax_safetensors.geometry.encoding import Parameter, Role
from orbax_safetensors.mapping.flat_codes import FlatCodes
from orbax_safetensors.mapping.formats import EXPONENTS, CodeLayout, Format
from orbax_safetensors.mapping.input_codes import InputCodes
from orbax_safetensors.mapping.quantization_config import Scheme, Settings
from orbax_safetensors.mapping.quantized_tensor import Quantized
from orbax_safetensors.mapping.stored_codes import BITS, WORD_BITS, Read, StoredCodes, StoredTypes, ended

_DENSE_BITS = (2, 3, 4, 5, 6, 8)  # of MLX's codes, which run over the ends of words
_MX_GROUP = 32  # elements that share an exponent, by OCP's specification


def quantized(
    row: Format,
    name: str,
    codes: str,
    names: Mapping[Role, str],
    stored: StoredTypes,
    settings: Settings,
    read: Read,
) -> Quantized:
    """Return the tensor `name`, of which a format stores `codes`, and parameters under `names`.

    Raises `MappingError` if shapes do not fit each other.
    """
    if 0 in stored[codes][0]:
        raise MappingError(f"{codes!r}: expected codes of at least one element, found shape {stored[codes][0]}")
    facts = row, name, codes, names, stored, settings, read
    match row.layout:
        case CodeLayout.OUTPUTS | CodeLayout.BLOCKS:
            return OutputCodes(*facts).outputs()
        case CodeLayout.EXPERTS:
            return OutputCodes(*facts).experts()
        case CodeLayout.INPUTS:
            return InputCodes(*facts).inputs()
        case CodeLayout.INPUT_WORDS:
            return InputCodes(*facts).input_words()
        case CodeLayout.FLAT:
            return FlatCodes(*facts).flat()


class OutputCodes(StoredCodes):
    """Codes of matrices whose rows are outputs, or of experts."""

    def outputs(self) -> Quantized:
        """Return the tensor, whose rows are outputs."""
        row, found = self.row, self.found
        if row.layout is CodeLayout.BLOCKS:
            wanted = row.group * row.bits // 8  # type: ignore[operator]  # formats in blocks name both
            if len(found) < 4 or found[-1] != wanted:
                raise MappingError(f"{self.codes!r}: expected shape (experts, rows, groups, {wanted}), found {found}")
            if self.shapes[Role.SCALE] != found[:-1]:
                raise MappingError(
                    f"{self.names[Role.SCALE]!r}: expected shape {found[:-1]} for {self.codes!r} of shape {found}, "
                    f"found {self.shapes[Role.SCALE]}"
                )
            found = (*found[:-2], found[-2] * found[-1])
        if len(found) < 2:
            raise MappingError(f"{self.codes!r}: expected two dimensions or more, found shape {found}")
        word_bits = DTYPES[self.stored[self.codes][1]].bits
        bits, columns = self._bits_and_columns(found, word_bits)
        seen = (*found[:-1], columns)
        found = self._matrices(found, bits)
        shape = (*found[:-1], found[-1] * word_bits // bits)
        kept = (*found[:-1], columns)
        values = row.values.format(bits=bits)
        grouped = Role.GROUP in self.names and Role.SCALE in self.names
        block = self._block(kept, bits)
        parameters = []
        for role in self.names:
            dtype, at = self.dtypes[role], self.shapes[role]
            match role:
                case Role.SCALE:
                    grid = -(-kept[-2] // block[0]), -(-columns // block[1])
                    here = (block[0], 0) if grouped else block
                    parameters.append(Parameter(role, dtype, grid, here))
                case Role.ZERO if dtype.bits == 8:
                    self.expect(role, self.shapes[Role.SCALE])
                    parameters.append(replace(parameters[0], role=role, dtype=dtype))
                case Role.ZERO:
                    values = f"unsigned{bits}"
                    grid = -(-kept[-2] // block[0]), -(-columns // block[1])
                    self.expect(role, (-(-grid[0] * bits // WORD_BITS), grid[1]))
                    here = (block[0], 0) if grouped else block
                    parameters.append(Parameter(role, dtype, grid, here, bits, down=True))
                case Role.GROUP:
                    self.expect(role, (columns,))
                    parameters.append(Parameter(role, dtype, (1, columns), (kept[-2], 1)))
                case Role.BIAS:
                    self.expect(role, self.shapes[Role.SCALE])
                    parameters.append(replace(parameters[0], role=role, dtype=dtype))
                case Role.INPUT_FACTOR if len(found) == 2:
                    self.expect(role, (columns,))
                    parameters.append(Parameter(role, dtype, (1, columns), (kept[-2], 1)))
                case _:  # of a whole matrix
                    if at != found[:-2] and (prod(at) != 1 or len(found) > 2):
                        raise MappingError(
                            f"{self.names[role]!r}: expected one number for {self.codes!r}, found shape {at}"
                        )
                    divided = self.formats[role].divided
                    parameters.append(Parameter(role, dtype, (1, 1), (kept[-2], columns), divided=divided))
        encoding = self.encoding(shape, bits, values, parameters)
        axes = tuple(range(len(shape)))
        if row.layout is CodeLayout.BLOCKS:
            axes = (*axes[:-2], axes[-1], axes[-2])
            kept = seen = tuple(kept[axis] for axis in axes)
        return self.quantized(encoding, seen, shape, axes, kept)

    def _matrices(self, found: tuple[int, ...], bits: int) -> tuple[int, ...]:
        """Return the shape of codes as matrices among which no scale is shared, and no block begins within one.

        Experts with one scale are one matrix. Rows that a model's shards had are a matrix for each shard.
        """
        scale = self.shapes[Role.SCALE]
        if scale == () and len(found) > 2:
            return prod(found[:-1]), found[-1]
        if not self.codes.endswith(self.row.sharded) or len(found) != 2 or len(scale) != 2:
            return found
        fitting: dict[tuple[int, int], int] = {}  # the least number of shards by what its scales are for
        for height in {scheme.block[0] for scheme in self._schemes(bits) if scheme.strategy == "block"}:
            for shards in range(min(*scale[:1], *found[:1]), 0, -1):
                size = found[0] // shards
                blocks = -(-size // height)
                if found[0] % shards == 0 and shards * blocks == scale[0]:
                    fitting[height, size if size % height else height] = shards  # shards of whole blocks are alike
        if len(fitting) > 1:
            raise MappingError(
                f"{self.names[Role.SCALE]!r}: expected {scale[0]} rows of scales for {found[0]} rows of {self.codes!r} "
                f"in one way only, found that {' or '.join(map(str, sorted(fitting.values())))} shards have so many"
            )
        shards = next(iter(fitting.values()), 1)
        if shards == 1:
            return found
        self.shapes[Role.SCALE] = (shards, scale[0] // shards, scale[1])
        return shards, found[0] // shards, found[1]

    def experts(self) -> Quantized:
        """Return the matrices of experts, two columns or two rows of which are in a byte."""
        if len(self.found) != 3:
            raise MappingError(f"{self.codes!r}: expected shape (experts, rows, columns), found {self.found}")
        self._schemes(4)  # groups of the config
        experts, rows, columns = self.found
        group, scale, second = self.row.group or 1, self.shapes[Role.SCALE], self.shapes[Role.FACTOR]
        shapes = {}  # of scales, by how many rows are in a byte
        if 2 * columns % group == 0:
            shapes[1] = experts, rows, 2 * columns // group
        if 2 * rows % group == 0:
            shapes[2] = experts, 2 * rows // group, columns
        fields = next((fields for fields, shape in shapes.items() if shape == scale), 0)
        if not fields:
            raise MappingError(
                f"{self.names[Role.SCALE]!r}: expected {' or '.join(map(str, shapes.values())) or 'no scales'} for "
                f"groups of {group} of {self.codes!r} of shape {self.found}, found shape {scale}"
            )
        shape = experts * rows, 2 * columns
        heights = {(): shape[0], (1,): shape[0], (experts,): rows}
        if fields == 1 and rows % 2 == 0:
            heights[experts, 2] = rows // 2  # gates, and what they are for
        if second not in heights:
            raise MappingError(
                f"{self.names[Role.FACTOR]!r}: expected shape {' or '.join(map(str, heights))} for {self.codes!r} of "
                f"shape {self.found}, found {second}"
            )
        parameters = []
        block = (1, group) if fields == 1 else (group // 2, 2)
        for role, blocks in ((Role.SCALE, block), (Role.FACTOR, (heights[second], shape[1]))):
            grid = shape[0] // blocks[0], shape[1] // blocks[1]
            parameters.append(Parameter(role, self.dtypes[role], grid, blocks))
        encoding = self.encoding(shape, 4, self.row.values, parameters, rows_in_word=fields)
        seen = experts, rows * fields, shape[1] // fields
        unfolded = experts, rows, seen[2], fields
        return self.quantized(encoding, seen, unfolded, (0, 1, 3, 2), (experts, rows, fields, seen[2]))

    def _bits_and_columns(self, found: tuple[int, ...], word_bits: int) -> tuple[int, int]:
        """Return the bits of a code, and how many of a row are elements: the last word may have fewer."""
        row = self.row
        if row.bits is not None:
            return row.bits, found[-1] * word_bits // row.bits
        if not row.facts:
            return self._stated_bits(found[-1] * word_bits, word_bits)
        scale = self.shapes[Role.SCALE]
        groups = scale[-1] if len(scale) == 2 else 1
        candidates: set[tuple[int, int]] = set()
        said = {(scheme.bits, scheme.group) for scheme in self.settings.schemes if scheme.kind == "int"}
        for bits, group in said or {(bits, None) for bits in BITS}:
            if bits not in BITS:
                raise MappingError(
                    f"{self.codes!r}: expected codes of {BITS} bits, found {bits} in quantization_config"
                )
            per_word = WORD_BITS // bits
            if group is None:
                candidates.update(
                    (bits, columns) for columns in range((found[-1] - 1) * per_word + 1, found[-1] * per_word + 1)
                )
            elif (found[-1] - 1) * per_word < groups * group <= found[-1] * per_word:
                candidates.add((bits, groups * group))
        if len(candidates) == 1:
            return candidates.pop()
        name = ended(self.codes, row.codes, row.facts[0])
        columns = self._integers(name)[-1]
        fitting = {bits for bits, fits in candidates if fits == columns}
        if len(fitting) != 1:
            raise MappingError(
                f"{self.codes!r}: expected int32 words for {columns} columns, as {name!r} says, in groups and codes of "
                f"quantization_config, found shape {found} and scales of shape {scale}"
            )
        return fitting.pop(), columns

    def _stated_bits(self, row_bits: int, word_bits: int) -> tuple[int, int]:
        """Return the bits that the config says of a code of this module, and how many codes a row has."""
        stated = list({scheme.bits for scheme in self.settings.schemes if scheme.kind == "int"} - {word_bits})
        if len(stated) != 1 or stated[0] not in _DENSE_BITS or row_bits % stated[0]:
            raise MappingError(
                f"{self.codes!r}: expected rows of whole codes of {', '.join(map(str, _DENSE_BITS))} bits, found rows "
                f"of {row_bits} bits, and codes of {shown(stated)} for its module in quantization_config"
            )
        return stated[0], row_bits // stated[0]

    def _integers(self, name: str) -> tuple[int, ...]:
        """Return the two numbers of a stored tensor that has a shape."""
        data = self.read(name) if name in self.stored else b""
        if len(data) not in (8, 16):
            raise MappingError(f"{name!r}: expected two integers, the shape of {self.name!r}, found {len(data)} bytes")
        return tuple(np.frombuffer(data, f"<i{len(data) // 2}").tolist())

    def _block(self, shape: tuple[int, ...], bits: int) -> tuple[int, int]:
        """Return how many rows and columns share a scale, according to the shape of the scales and the config."""
        found = self.shapes[Role.SCALE]
        expected = {}
        fitting = []
        for scheme in self._schemes(bits):
            what, block, shapes = self._shared(scheme, shape)
            expected[what] = shapes
            if found in shapes:
                fitting.append((scheme, block))
        for scheme, block in fitting:
            if scheme.required <= self.names.keys():
                return min(block[0], shape[-2]), min(block[1], shape[-1])
        if fitting:
            self.check_required(fitting[0][0])
        texts = [f"{' or '.join(map(str, shapes)) or 'none'} for {what}" for what, shapes in expected.items()]
        missing = "" if self.settings.schemes or self.row.group else "; quantization_config has no block size"
        raise MappingError(
            f"{self.names[Role.SCALE]!r}: expected {', '.join(texts)} of {self.codes!r} of shape {self.found}, "
            f"found shape {found}{missing}"
        )

    def _schemes(self, bits: int) -> list[Scheme]:
        """Return what the config says of codes like these, or everything that there is if it does not say anything."""
        kind = "float" if self.row.values.endswith(("F4", "F8_E4M3")) else "int"
        said = self.settings.of(kind, bits)
        if self.row.values == "int8" and self.settings.method != "gemma":  # a byte may have a code of fewer bits
            said = [scheme for scheme in self.settings.schemes if scheme.kind == kind and scheme.bits <= bits]
        if not said and self.settings.method in ("compressed-tensors", "mlx", "gemma"):
            kinds = dict.fromkeys(f"{each.kind} codes of {each.bits} bits" for each in self.settings.schemes)
            raise MappingError(
                f"{self.codes!r}: expected {' or '.join(kinds) or 'plain values'}, as in quantization_config, "
                f"found {self.row.name.format(bits=bits)}"
            )
        if size := self.row.group:
            groups = {scheme.group for scheme in said} - {None}
            if groups and size not in groups:
                raise MappingError(
                    f"{self.codes!r}: expected groups of {' or '.join(map(str, groups))}, as in quantization_config, "
                    f"found {self.row.name}, which has groups of {size}"
                )
            return [Scheme(kind, bits, "group", size)]
        if said:
            return said
        grouped = ["group"] if kind == "int" or self.dtypes[Role.SCALE].name in EXPONENTS else []
        return [Scheme(kind, bits, strategy) for strategy in ("channel", "tensor", *grouped)]

    def _shared(self, scheme: Scheme, shape: tuple[int, ...]) -> tuple[str, tuple[int, int], list[tuple[int, ...]]]:
        """Return what shares a scale in words, its rows and columns, and the shapes that scales may then have."""
        *leading, rows, columns = shape
        match scheme.strategy:
            case "tensor":
                return "the tensor", (rows, columns), [tuple(leading)] if leading else [(), (1,), (1, 1)]
            case "channel":
                shapes = [(*leading, rows, 1), (*leading, rows)]  # in experts that are square, these may be columns
                return "rows", (1, columns), shapes[:1] if leading and rows == columns else shapes
            case "block":
                block = scheme.block
                high, wide = -(-rows // block[0]), -(-columns // block[1])
                shapes = [(*leading, high, wide)]
                if self.settings.method == "modelopt":
                    shapes.append((*leading, high, 1, wide, 1))
                if high == wide == 1 and not leading:
                    shapes += [(1,), ()]
                return f"blocks of {block[0]} x {block[1]}", block, shapes
        size = scheme.group or _MX_GROUP
        if scheme.group is None and scheme.kind == "int":
            size = columns // max((1, *self.shapes[Role.SCALE][-1:])) or 1
        return f"groups of {size}", (1, size), [] if columns % size else [(*leading, rows, columns // size)]
