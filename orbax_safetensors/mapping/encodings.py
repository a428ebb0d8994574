"""From a row of `mapping.formats` and the shapes of what is stored to the `Encoding` of a quantised tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format import strict_json
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.format.header import shown
from orbax_safetensors.geometry.encoding import Encoding, Order, Parameter, Role
from orbax_safetensors.mapping.formats import EXPONENTS, CodeLayout, Format
from orbax_safetensors.mapping.quantization_config import Scheme, Settings
from orbax_safetensors.mapping.quantized_tensor import Quantized

StoredTypes = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype as spelled in a header
Read = Callable[[str], bytes]  # the data of a small tensor by its name

_WORD_BITS = 32
_BITS = (2, 4, 8)
_DENSE_BITS = (2, 3, 4, 5, 6, 8)  # of MLX's codes, which run over the ends of words
_LONGEST_BLOCK = 4096  # elements of bitsandbytes' longest block
_MX_GROUP = 32  # elements that share an exponent, by OCP's specification
_SAYS = {Role.ZERO: "codes are asymmetric", Role.GROUP: "groups are permuted"}


def ended(name: str, ending: str, other: str) -> str:
    """Return `name` with another ending."""
    return name[: len(name) - len(ending)] + other


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
    tensor = _Tensor(row, name, codes, names, stored, settings, read)
    if 0 in tensor.found:
        raise MappingError(f"{codes!r}: expected codes of at least one element, found shape {tensor.found}")
    match row.layout:
        case CodeLayout.OUTPUTS | CodeLayout.BLOCKS:
            return tensor.outputs()
        case CodeLayout.EXPERTS:
            return tensor.experts()
        case CodeLayout.INPUTS:
            return tensor.inputs()
        case CodeLayout.INPUT_WORDS:
            return tensor.input_words()
        case CodeLayout.FLAT:
            return tensor.flat()


class _Tensor:
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
                    self._expect(role, self.shapes[Role.SCALE])
                    parameters.append(replace(parameters[0], role=role, dtype=dtype))
                case Role.ZERO:
                    values = f"unsigned{bits}"
                    grid = -(-kept[-2] // block[0]), -(-columns // block[1])
                    self._expect(role, (-(-grid[0] * bits // _WORD_BITS), grid[1]))
                    here = (block[0], 0) if grouped else block
                    parameters.append(Parameter(role, dtype, grid, here, bits, down=True))
                case Role.GROUP:
                    self._expect(role, (columns,))
                    parameters.append(Parameter(role, dtype, (1, columns), (kept[-2], 1)))
                case Role.BIAS:
                    self._expect(role, self.shapes[Role.SCALE])
                    parameters.append(replace(parameters[0], role=role, dtype=dtype))
                case Role.INPUT_FACTOR if len(found) == 2:
                    self._expect(role, (columns,))
                    parameters.append(Parameter(role, dtype, (1, columns), (kept[-2], 1)))
                case _:  # of a whole matrix
                    if at != found[:-2] and (prod(at) != 1 or len(found) > 2):
                        raise MappingError(
                            f"{self.names[role]!r}: expected one number for {self.codes!r}, found shape {at}"
                        )
                    divided = self.formats[role].divided
                    parameters.append(Parameter(role, dtype, (1, 1), (kept[-2], columns), divided=divided))
        encoding = self._encoding(shape, bits, values, parameters)
        axes = tuple(range(len(shape)))
        if row.layout is CodeLayout.BLOCKS:
            axes = (*axes[:-2], axes[-1], axes[-2])
            kept = seen = tuple(kept[axis] for axis in axes)
        return self._quantized(encoding, seen, shape, axes, kept)

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
        encoding = self._encoding(shape, 4, self.row.values, parameters, rows_in_word=fields)
        seen = experts, rows * fields, shape[1] // fields
        unfolded = experts, rows, seen[2], fields
        return self._quantized(encoding, seen, unfolded, (0, 1, 3, 2), (experts, rows, fields, seen[2]))

    def _bits_and_columns(self, found: tuple[int, ...], word_bits: int) -> tuple[int, int]:
        """Return the bits of a code, and how many of a row are elements: the last word may have fewer."""
        row = self.row
        if row.bits is not None:
            return row.bits, found[-1] * word_bits // row.bits
        if not row.facts:
            return self._stated_bits(found[-1] * word_bits)
        scale = self.shapes[Role.SCALE]
        groups = scale[-1] if len(scale) == 2 else 1
        candidates: set[tuple[int, int]] = set()
        said = {(scheme.bits, scheme.group) for scheme in self.settings.schemes if scheme.kind == "int"}
        for bits, group in said or {(bits, None) for bits in _BITS}:
            if bits not in _BITS:
                raise MappingError(
                    f"{self.codes!r}: expected codes of {_BITS} bits, found {bits} in quantization_config"
                )
            per_word = _WORD_BITS // bits
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

    def _stated_bits(self, row_bits: int) -> tuple[int, int]:
        """Return the bits that the config says of a code of this module, and how many codes a row has."""
        stated = [scheme.bits for scheme in self.settings.schemes if scheme.kind == "int"]
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
            self._check_required(fitting[0][0])
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
        if self.row.values == "int8":  # a byte may have a code of fewer bits
            said = [scheme for scheme in self.settings.schemes if scheme.kind == kind and scheme.bits <= bits]
        if not said and self.settings.method in ("compressed-tensors", "mlx"):
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
        if scheme.group is None and self.row.bits is None:
            size = columns // max((1, *self.shapes[Role.SCALE][-1:])) or 1
        return f"groups of {size}", (1, size), [] if columns % size else [(*leading, rows, columns // size)]

    def _check_required(self, scheme: Scheme) -> None:
        """Raise `MappingError` if something is not stored that the config says to be there."""
        for role in scheme.required - self.names.keys():
            endings = [ending for each in self.row.parameters if each.role is role for ending in each.endings]
            names = [repr(ended(self.codes, self.row.codes, ending)) for ending in endings]
            raise MappingError(
                f"{self.codes!r}: expected {' or '.join(names) or 'another format'}, because {_SAYS[role]} "
                f"according to quantization_config, found {'no such tensor' if names else self.row.name}"
            )

    def inputs(self) -> Quantized:
        """Return the tensor, whose rows are inputs."""
        inputs, words = self._matrix()
        bits = self.row.bits or 4
        self._check_bits(bits)
        outputs = words * (_WORD_BITS // bits)
        groups, group = self._input_groups(inputs, outputs)
        self._expect(Role.ZERO, (groups, words))
        grid = groups, outputs
        encoding = self._encoding(
            (inputs, outputs),
            bits,
            self.row.values,
            [
                Parameter(Role.SCALE, self.dtypes[Role.SCALE], grid, (group, 1)),
                Parameter(Role.ZERO, self.dtypes[Role.ZERO], grid, (group, 1), bits, self.row.order),
            ],
        )
        shape = outputs, inputs
        return self._quantized(encoding, shape, encoding.shape, (1, 0), shape)

    def input_words(self) -> Quantized:
        """Return the tensor, whose rows are words of inputs."""
        rows, outputs = self._matrix()
        zeros = self.shapes[Role.ZERO]
        if (
            len(zeros) != 2
            or outputs == 0
            or zeros[1] * _WORD_BITS % outputs
            or zeros[1] * _WORD_BITS // outputs not in _BITS
        ):
            raise MappingError(
                f"{self.names[Role.ZERO]!r}: expected shape (groups, {outputs} * bits / 32) for {self.codes!r} of "
                f"shape {self.found} and {', '.join(map(str, _BITS))} bits, found {zeros}"
            )
        bits = zeros[1] * _WORD_BITS // outputs
        self._check_bits(bits)
        per_word = _WORD_BITS // bits
        inputs = rows * per_word
        groups, group = self._input_groups(inputs, outputs)
        self._expect(Role.ZERO, (groups, zeros[1]))
        for scheme in self.settings.of("int", bits):
            self._check_required(scheme)
        permuted = Role.GROUP in self.names and not self.settings.in_order
        if not permuted and group % per_word:
            raise MappingError(
                f"{self.codes!r}: expected groups of whole words of {per_word} inputs, found groups of {group}"
            )
        block = (0, per_word) if permuted else (group // per_word, per_word)
        added = sum(1 << at for at in range(0, _WORD_BITS, bits)) if self.settings.zero_added else 0
        parameters = [
            Parameter(Role.SCALE, self.dtypes[Role.SCALE], (groups, outputs), block),
            Parameter(Role.ZERO, self.dtypes[Role.ZERO], (groups, outputs), block, bits, added=added),
        ]
        if Role.GROUP in self.names:
            self._expect(Role.GROUP, (inputs,))
            parameters.append(Parameter(Role.GROUP, self.dtypes[Role.GROUP], (rows, per_word), (1, 0)))
        values = self.row.values.format(bits=bits)
        encoding = self._encoding((rows, outputs * per_word), bits, values, parameters, rows_in_word=per_word)
        kept = outputs, rows, per_word
        return self._quantized(encoding, (outputs, inputs), (rows, outputs, per_word), (1, 0, 2), kept)

    def _matrix(self) -> tuple[int, int]:
        if len(self.found) != 2:
            raise MappingError(f"{self.codes!r}: expected two dimensions, found shape {self.found}")
        return self.found[0], self.found[1]

    def _check_bits(self, bits: int) -> None:
        said = {scheme.bits for scheme in self.settings.schemes if scheme.kind == "int"}
        if said and bits not in said:
            raise MappingError(
                f"{self.codes!r}: expected codes of {shown(said)} bits, as in quantization_config, found {bits}"
            )

    def _input_groups(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Return how many groups of inputs there are, and the inputs of each."""
        scale = self.shapes[Role.SCALE]
        groups = scale[0] if len(scale) == 2 else 0
        group = -(-inputs // groups) if groups else 0
        for scheme in self.settings.schemes:
            if scheme.kind == "int" and (scheme.group is not None or scheme.strategy == "channel"):
                group = min(scheme.group or inputs, inputs)
        if scale != (groups, outputs) or group == 0 or -(-inputs // group) != groups:
            sized = f"{inputs} / {group}" if group else "groups"
            raise MappingError(
                f"{self.names[Role.SCALE]!r}: expected shape ({sized}, {outputs}) for {self.codes!r} of shape "
                f"{self.found}, found {scale}"
            )
        return groups, group

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
        self._expect(Role.SCALE, (blocks,))
        self._expect(Role.VALUES, (16,))
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
            self._expect(Role.FACTOR, (-(-blocks // nested),))
            self._expect(Role.SCALE_VALUES, (256,))
            parameters += [
                Parameter(Role.SCALE_VALUES, self.dtypes[Role.SCALE_VALUES], (1, 256), (blocks, 0)),
                Parameter(Role.FACTOR, self.dtypes[Role.FACTOR], (-(-blocks // nested), 1), (nested, size)),
            ]
            added = float(offset)
        encoding = self._encoding(
            every, 4, self.row.values, parameters, added=added, padding=prod(every) - 2 * prod(self.found)
        )
        return self._quantized(encoding, shape, (prod(every),), (0,), (elements,))

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

    def _expect(self, role: Role, shape: tuple[int, ...]) -> None:
        if self.shapes[role] != shape:
            raise MappingError(
                f"{self.names[role]!r}: expected shape {shape} for {self.codes!r} of shape {self.found}, "
                f"found {self.shapes[role]}"
            )

    def _encoding(
        self, shape: tuple[int, ...], bits: int, values: str, parameters: Sequence[Parameter], **others: Any
    ) -> Encoding:
        return _encoding(shape, bits, values, tuple(parameters), self.row.order, final=self.row.final, **others)

    def _quantized(
        self,
        encoding: Encoding,
        shape: tuple[int, ...],
        unfolded: tuple[int, ...],
        axes: tuple[int, ...],
        kept: tuple[int, ...],
    ) -> Quantized:
        names = tuple(self.names[parameter.role] for parameter in encoding.parameters)
        label = self.row.name.format(bits=encoding.bits)
        return Quantized(self.name, label, self.codes, names, encoding, shape, unfolded, axes, kept)


@lru_cache
def _encoding(
    shape: tuple[int, ...], bits: int, values: str, parameters: tuple[Parameter, ...], order: Order, **others: Any
) -> Encoding:
    """Return an encoding: the same object for all tensors with equal arguments."""
    return Encoding(shape, bits, values, parameters, order, **others)
