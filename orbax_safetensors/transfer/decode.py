"""Decodes quantised tensors with NumPy: one decoder for every `Encoding`.

What it computes, in float32 and in this order, is `((value - zero) * scale + bias) * input_factor * final`, where
`value` is what the code means, and `scale` is a stored number, or one that two levels of scales make. That is what the
programs do that models are published with, so the results, which are rounded once, have the same bits.

Elements are computed in one of two ways. If few scales are different, a table has the results for every byte of codes,
and nothing is computed for each element. Otherwise, a table has the values of every byte, and NumPy does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import DType
from orbax_safetensors.geometry.encoding import Area, Encoding, Order, Parameter, Patch, Role
from orbax_safetensors.transfer.code_values import (
    BYTES,
    CODES,
    EVEN_FIRST_SHIFTS,
    in_order,
    integers,
    items,
    of_bytes,
    of_kind,
    values_of_bytes,
)

# Bytes of codes that are looked up at a time: NumPy takes eight bytes for the index of each, which should stay in a
# core's cache. With fewer bytes, threads wait for one another between the steps.
_CHUNK = 2**16
# Elements with one scale that are multiplied by it in one call; NumPy begins a loop in about the time of ten elements.
_SHORT = 16
# Bytes of codes from which on it takes less time to make tables for all scales of a byte, and to look results up.
_WORTH_TABLES = 2**15
# Scales of one kind with tables, which take 1 KiB each for codes of 4 bits: about as many as fit in a core's cache.
_MOST_TABLES = 2**11

# Why a group index is refused that the config says is in order; devices decode groups only if it is.
GROUPS_PERMUTED = "its group index permutes groups: expected desc_act true in its config"

# The factors of U8 scales, which are exponents of 2 plus 127. Each is a number, even for 255, which is NaN in the OCP
# specification and 2**128 in the decoders that programs use: half of it, times "doubled F4", is what these compute.
_HALF_POWERS = np.ldexp(np.float32(1), BYTES.astype(np.int32) - 128)
with np.errstate(over="ignore"):
    _POWERS = np.ldexp(np.float32(1), BYTES.astype(np.int32) - 127)


def decode(
    encoding: Encoding,
    area: Area,
    codes: np.ndarray,
    parameters: Sequence[tuple[Patch, np.ndarray]],
    out: np.ndarray,
    *,
    apart: bool = False,
) -> None:
    """Decode the elements of an area into `out`, one-dimensional, as float32 or rounded from it to bfloat16.

    Args:
      encoding: how the tensor is stored.
      area: which elements to decode.
      codes: exactly the bytes of these elements, one-dimensional uint8.
      parameters: for each of `encoding.parameters`, a patch with what the area needs, and the bytes of the patch, as
        one-dimensional uint8.
      out: as many elements as the area has, in the order of the codes unless they are `apart`.
      apart: for codes of several rows in a word, whether `out` has these rows one after the other. If a word has two
        rows, a and b, of three elements, the codes are in the order a0 b0 a1 b1 a2 b2; apart, elements are in the order
        a0 a1 a2 b0 b1 b2.

    The interpreter lock is free most of the time. Raises `TensorMismatchError`, which does not know the tensor's name,
    if a group index selects a group that there is not.
    """
    by_role = {
        parameter.role: _parameter_entries(encoding, parameter, area, patch, stored)
        for parameter, (patch, stored) in zip(encoding.parameters, parameters, strict=True)
    }
    if Role.GROUP in by_role:
        _check_groups(encoding, area, by_role)
    if encoding.word_added:
        codes = (codes.view("<u4") + np.uint32(encoding.word_added)).view(np.uint8)
    if encoding.order is Order.EVEN_FIRST:
        codes = in_order(codes)
    codes, out = codes.reshape(len(area.rows), -1), out.reshape(len(area.rows), -1)
    fields, width = encoding.rows_in_word, area.width // encoding.rows_in_word
    step = max(_CHUNK // codes.shape[1], 1)
    parts = [slice(first, first + step) for first in range(0, len(area.rows), step)]
    tables = _tables(encoding, by_role, codes.size, out.dtype)
    if tables is not None:
        for part in parts:
            _look_up(*tables, by_role[Role.SCALE], codes[part], part, out[part])
        return
    values = values_of_bytes(encoding)
    if Role.VALUES in by_role:
        values = of_bytes(by_role[Role.VALUES].entries.reshape(-1), encoding.bits, encoding.order)
    terms = [(operation, by_role[role]) for role, operation in _SECOND.items() if role in by_role]
    if Role.SCALE in by_role:
        terms = [(np.multiply, _scales(encoding, by_role))]
    if Role.ZERO in by_role:
        terms.insert(0, (np.subtract, by_role[Role.ZERO]))
    for role, operation in _AFTER.items():
        if role in by_role:
            term = by_role[role]
            terms.append((operation, term._replace(entries=term.entries.astype(np.float32))))
    buffer = np.empty((min(step, len(area.rows)) * fields, width), np.float32)
    for part in parts:
        count = len(area.rows[part])
        elements = buffer[: count * fields]
        if values is None:
            np.copyto(elements, integers(encoding, codes[part]))
        elif fields > 1:
            np.take(CODES[encoding.values], integers(encoding, codes[part]), out=elements, mode="clip")
        else:
            np.take(values, codes[part], out=elements.view(values.dtype), mode="clip")
        with np.errstate(all="ignore"):
            for operation, term in terms:
                _apply(operation, elements, term, by_role.get(Role.GROUP), part, fields)
            if encoding.final != 1:
                np.multiply(elements, np.float32(encoding.final), out=elements)
            into = out[part].reshape((count, fields, width) if apart else (count, width, fields))
            fields_first = elements.reshape(count, fields, width)
            np.copyto(into, fields_first if apart else fields_first.swapaxes(1, 2), casting="unsafe")


class _ParameterEntries(NamedTuple):
    """What a parameter says of the elements of an area: scales, say, and which of them is for which element.

    With scales for blocks of 2 x 32 elements, an area of the rows 4 to 7 and the columns 0 to 63 has 2 x 2 entries:
    `rows` are 0, 0, 1, 1, `columns` are 0, 1, and `width` is 32.

    Attributes:
      dtype: of an entry in the file.
      entries: two-dimensional.
      rows: for each row of the area, the row of `entries`; None if a group index selects among all.
      columns: for each `width` elements of a row, the column of `entries`; None if a group index selects among all.
      width: elements of a row that share an entry.
    """

    dtype: DType
    entries: np.ndarray
    rows: np.ndarray | None
    columns: np.ndarray | None
    width: int


def _parameter_entries(
    encoding: Encoding, parameter: Parameter, area: Area, patch: Patch, stored: np.ndarray
) -> _ParameterEntries:
    """Return the entries of a parameter for an area."""
    dtype = parameter.dtype.numpy if not parameter.bits else np.dtype("<u4")
    assert dtype is not None, parameter
    begin, end = patch.columns
    words: np.ndarray = np.ndarray(
        (len(patch.rows), end - begin), dtype, stored.data, 0, (patch.row_bytes, dtype.itemsize)
    )
    entry_rows, (low, high) = encoding.entries(parameter, area)
    down, across = parameter.per_word
    word_rows = entry_rows // down if down > 1 else entry_rows
    top, bottom = np.searchsorted(patch.rows, word_rows[[0, -1]]).tolist()
    words = words[top : bottom + 1, low - begin : high - begin]
    rows = None
    if parameter.block[0]:
        is_range = word_rows[-1] - word_rows[0] == bottom - top
        rows = word_rows - word_rows[0] if is_range else np.searchsorted(patch.rows, word_rows) - top
        rows = rows * down + entry_rows % down if down > 1 else rows
    entries = _entries(parameter, words)
    if not parameter.block[1]:
        return _ParameterEntries(parameter.dtype, entries, rows, None, 1)
    columns, width = area.block_columns(parameter.block[1])
    columns = np.minimum(columns, parameter.grid[1] - 1)  # of elements that fill the last word of a row
    return _ParameterEntries(parameter.dtype, entries, rows, columns - low * across, width // encoding.rows_in_word)


def _check_groups(encoding: Encoding, area: Area, by_role: dict[Role, _ParameterEntries]) -> None:
    """Raise `TensorMismatchError` if a group index selects a group that there is not.

    An index of -1 everywhere selects none: groups are then in the order of the columns. An index that is not needed,
    because the config says that groups are in the order of the inputs, has to be in this order.
    """
    index = by_role[Role.GROUP].entries
    for role in {Role.SCALE, Role.ZERO} & by_role.keys():
        term = by_role[role]
        if term.rows is not None and term.columns is not None:  # nothing is selected, so the index has to say the same
            height = next(each.block[0] for each in encoding.parameters if each.role is role)
            if (index[by_role[Role.GROUP].rows] != (area.rows // height)[:, None]).any():
                raise TensorMismatchError(GROUPS_PERMUTED)
            continue
        groups = term.entries.shape[0 if term.rows is None else 1]
        if term.rows is not None and (index == -1).all():
            size = next(each.grid[1] for each in encoding.parameters if each.role is Role.GROUP)
            columns, width = area.block_columns(size // groups)
            by_role[role] = term._replace(columns=np.minimum(columns, groups - 1), width=width)
        elif index.min() < 0 or index.max() >= groups:
            raise TensorMismatchError(
                f"its group index has {int(index.min())} to {int(index.max())}, expected 0 to {groups - 1}"
            )


def _entries(parameter: Parameter, words: np.ndarray) -> np.ndarray:
    """Return the entries in a matrix of words, of their stored dtype or unpacked."""
    if not parameter.bits:
        return words if parameter.divided == 1 else words / np.float32(parameter.divided)
    if parameter.added:
        words = words + np.uint32(parameter.added)
    shifts = np.arange(0, 32, parameter.bits, dtype=np.uint32)
    if parameter.order is Order.EVEN_FIRST:
        shifts = EVEN_FIRST_SHIFTS
    fields = words[..., None] >> shifts & np.uint32(2**parameter.bits - 1)
    if parameter.down:
        fields = fields.swapaxes(1, 2)
    entries: np.ndarray = fields.reshape(len(fields) * (fields.shape[1] if parameter.down else 1), -1)
    return entries.astype(np.float32)


def _tables(
    encoding: Encoding, by_role: Mapping[Role, _ParameterEntries], nbytes: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the number of each scale, and tables with the results for every byte, by number.

    Returns None if it takes longer to make tables than to use them, and if there is more than scales.
    """
    if Role.SCALE not in by_role:
        return None
    scales = by_role[Role.SCALE]
    others = by_role.keys() - {Role.SCALE}
    if others - {Role.FACTOR, Role.DIVISOR} or any(by_role[role].entries.size > 1 for role in others):
        return None
    if encoding.values not in CODES or encoding.final != 1 or scales.width * encoding.bits % 8:
        return None
    if scales.dtype.bits == 8 or scales.dtype.name == "BF16":
        second = tuple([(role, float(by_role[role].entries[0, 0])) for role in others])
        known = _known_results(encoding.values, encoding.bits, encoding.order, scales.dtype, second, dtype)
        numbers = scales.entries.view(f"u{scales.entries.itemsize}")
        return (numbers, known.tables) if known.add(numbers, nbytes) else None
    if 2 * scales.entries.size * 256 > nbytes:
        return None
    values = of_kind(encoding.values, encoding.bits, encoding.order)
    tables = _results(values, _scales(encoding, by_role).entries, dtype)
    return np.arange(scales.entries.size).reshape(scales.entries.shape), tables


class _Known:
    """Tables for scales of up to 16 bits, by their bits: of a tensor's scales, most are met again and again.

    Threads may add the same tables at once, which then have the same content.
    """

    def __init__(self, results: Callable[[np.ndarray], np.ndarray], scales: DType, item: np.dtype) -> None:
        self.results, self.dtype = results, np.dtype(f"u{scales.bits // 8}")
        self.is_known = np.zeros(2**scales.bits, bool)
        self.tables = np.empty(256 << scales.bits, item)  # memory only where something is written

    def add(self, numbers: np.ndarray, nbytes: int) -> bool:
        """Make what is missing for `nbytes` of codes; return False if that would take longer than it saves."""
        new = numbers[~self.is_known[numbers]]
        if new.size:
            new = np.unique(new)
            if 2 * new.size * 256 > max(nbytes, _WORTH_TABLES) or self.is_known.sum() + new.size > _MOST_TABLES:
                return False
            self.tables.reshape(-1, 256)[new] = self.results(new.astype(self.dtype))
            self.is_known[new] = True
        return True


# Each tensor with two levels of scales has tables of its own.
@lru_cache(maxsize=16)
def _known_results(
    values: str, bits: int, order: Order, scales: DType, second: tuple[tuple[Role, float], ...], dtype: np.dtype
) -> _Known:
    """Return the tables for scales of a dtype that were needed so far."""

    def results(numbers: np.ndarray) -> np.ndarray:
        floats = _floats(values, scales, numbers)
        with np.errstate(all="ignore"):
            for role, number in second:
                floats = _SECOND[role](floats, np.float32(number))
        return _results(of_kind(values, bits, order), floats, dtype).reshape(-1, 256)

    return _Known(results, scales, np.dtype(f"V{dtype.itemsize * 8 // bits}"))


def _results(values: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a table for each scale, one after the other."""
    table = values.view(np.float32).reshape(256, -1)
    products = np.empty((scales.size, *table.shape), dtype)
    with np.errstate(all="ignore"):
        np.multiply(table, scales.reshape(-1, 1, 1), out=products, dtype=np.float32, casting="unsafe")
    return items(products).reshape(-1)


_SECOND: dict[Role, np.ufunc] = {Role.FACTOR: np.multiply, Role.DIVISOR: np.divide}
_AFTER: dict[Role, np.ufunc] = {Role.BIAS: np.add, Role.INPUT_FACTOR: np.multiply}


def _scales(encoding: Encoding, by_role: Mapping[Role, _ParameterEntries]) -> _ParameterEntries:
    """Return scales as float32, both levels in one."""
    scales = by_role[Role.SCALE]
    if Role.SCALE_VALUES in by_role:
        floats = by_role[Role.SCALE_VALUES].entries.reshape(-1)[scales.entries]
    else:
        floats = _floats(encoding.values, scales.dtype, scales.entries)
    with np.errstate(all="ignore"):
        for role in _SECOND.keys() & by_role.keys():
            second = by_role[role]
            numbers = second.entries.astype(np.float32)
            if numbers.size > 1:
                floats, numbers = floats[scales.rows], numbers[second.rows]
                scales = scales._replace(rows=np.arange(len(floats)))
            floats = _SECOND[role](floats, numbers)
    return scales._replace(entries=floats + np.float32(encoding.added) if encoding.added else floats)


def _floats(values: str, dtype: DType, scales: np.ndarray) -> np.ndarray:
    """Return stored scales as float32; those of U8 are exponents of 2 plus 127."""
    floats: np.ndarray
    if dtype.name == "U8":
        floats = (_HALF_POWERS if values == "doubled F4" else _POWERS)[scales]
    else:
        assert dtype.numpy is not None, dtype
        floats = scales.view(dtype.numpy).astype(np.float32)
    return floats


def _look_up(
    numbers: np.ndarray, tables: np.ndarray, scales: _ParameterEntries, codes: np.ndarray, part: slice, out: np.ndarray
) -> None:
    """Write the results for some rows of an area; `tables` has 256 for each of `numbers`."""
    assert scales.rows is not None
    assert scales.columns is not None
    rows, height = _collapse_repeats(scales.rows[part])
    index = np.empty(codes.shape, np.min_scalar_type(tables.size - 1))
    blocks = (len(rows), height, len(scales.columns), -1)
    begins = _taken(numbers, rows, scales.columns).astype(index.dtype) << 8
    np.add(codes.reshape(blocks), begins[:, None, :, None], out=index.reshape(blocks))
    np.take(tables, index, out=out.view(tables.dtype), mode="clip")


def _apply(
    operation: np.ufunc,
    elements: np.ndarray,
    term: _ParameterEntries,
    group: _ParameterEntries | None,
    part: slice,
    fields: int,
) -> None:
    """Let `operation` change some rows of an area, each of `fields`, with the entry of `term` for each element."""
    columns, width = term.columns, term.width
    if term.rows is None:  # the groups of the fields
        assert group is not None
        assert group.rows is not None
        rows, height = group.entries[group.rows[part]].reshape(-1), 1
    else:
        rows, height = _collapse_repeats(term.rows[part])
        height *= fields
    if columns is None:  # the groups of columns
        assert group is not None
        assert group.columns is not None
        columns = np.repeat(group.entries[0][group.columns], group.width)
    assert columns is not None
    taken = _taken(term.entries, rows, columns)
    if width < _SHORT:
        taken, width = np.repeat(taken, width, axis=1), 1
    blocks = elements.reshape(len(rows), height, -1, width)
    operation(blocks, taken[:, None, :, None], out=blocks)


def _collapse_repeats(rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Return ascending `rows` without repetitions, and how often each is repeated: once, unless all are as often."""
    steps = rows[-1] - rows[0]
    if steps == 0:
        return rows[:1], len(rows)
    if steps == len(rows) - 1:
        return rows, 1
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    height = len(rows) // len(starts)
    if height * len(starts) == len(rows) and (starts == np.arange(len(starts)) * height).all():
        return rows[starts], height
    return rows, 1


def _taken(entries: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return `entries` of these rows and columns."""
    first, last = int(columns[0]), int(columns[-1])
    if last - first + 1 == len(columns) and bool((np.diff(columns) == 1).all()):
        chosen: np.ndarray = entries[:, first : last + 1][rows]
        return chosen
    return np.take(entries[rows], columns, axis=1)
