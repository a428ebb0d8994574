"""Executes the plan of a quantised tensor, as a restore does and slowly, and records what it asks for."""

import math
from dataclasses import dataclass, field

import numpy as np

from orbax_safetensors.geometry import coalesce
from orbax_safetensors.geometry.coalesce import Encoded, plan_encoded_reads
from orbax_safetensors.geometry.encoding import Encoding, Parameter, Role
from orbax_safetensors.geometry.view import TensorCopy, View
from orbax_safetensors.transfer.decode import decode
from tests.support import views


@dataclass
class Asked:
    """Ranges `(begin, length)` in bytes of the codes and of all parameters, and the memory of every window."""

    codes: list = field(default_factory=list)
    parameters: list = field(default_factory=list)
    memory: list = field(default_factory=list)


def execute(plan, codes, parameters, destinations, dtype=np.float32):
    """Fills a destination for every copy that was planned, from the bytes of all stored tensors."""
    asked = Asked()
    for access in plan.windowed:
        assert isinstance(access, Encoded)
        encoding = access.encoding
        shared = held_by(access.shared, parameters, asked)
        for low in range(0, access.runs.nbytes, access.pitch):
            high = min(low + access.pitch, access.runs.nbytes)
            pieces = list(access.runs.pieces(low, high))
            asked.codes += pieces
            packed, done = read(codes, pieces), 0
            decoded = np.empty(encoding.elements_in(high - low), dtype)
            areas = list(encoding.areas(access.runs, low, high))
            own = held_by(access.patches(areas), parameters, asked)
            memory = packed.nbytes + sum(stored.nbytes for _, stored in (*own.values(), *shared.values()))
            held = [(shared | own)[number] for number in range(len(parameters))]
            for area in areas:
                end = done + len(area.rows) * area.width
                area_codes = packed[encoding.bytes_of(done) : encoding.bytes_of(end)]
                decode(encoding, area, area_codes, held, decoded[done:end])
                done = end
            assert done == decoded.size
            asked.memory.append(memory + decoded.size * 4)
            first, last = encoding.elements_in(low), encoding.elements_in(high)
            for use in access.uses:
                for copy in use.copy.within(first, last):
                    views.run([TensorCopy("t", copy.shifted(-first), ())], {"t": decoded}, destinations[use.buffer])
    return asked


def held_by(patches, parameters, asked):
    """The bytes of patches, by the number of the parameter."""
    asked.parameters += [piece for patch in patches.values() for piece in patch.ranges]
    return {number: (patch, read(parameters[number], patch.ranges)) for number, patch in patches.items()}


def read(source, ranges):
    assert all(0 <= begin < begin + length <= source.size for begin, length in ranges)
    return np.concatenate([source[begin : begin + length] for begin, length in ranges])


def as_bytes(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def box_of(encoding, codes, parameters, box, *, view=None, dtype=np.float32, max_gap_bytes=0):
    """A box of a view of the decoded tensor, or of the tensor in the order of its codes."""
    shape = [stop - start for start, stop in box]
    out = np.empty(shape, dtype)
    taken = (view or View.tensor("t", encoding.shape, out.dtype)).copies(box, shape)
    if taken:
        plan = plan_encoded_reads(tuple((copy, False) for _, copy, _ in taken), encoding, max_gap_bytes)
        execute(plan, as_bytes(codes), list(map(as_bytes, parameters)), [out] * len(taken), dtype)
    return out


def scaled(shape, bits, values, dtype, block, **others):
    """An encoding whose only parameter has a scale for each block."""
    grid = -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
    return Encoding(shape, bits, values, (Parameter(Role.SCALE, dtype, grid, block),), **others)


def needed(encoding, copies):
    """Bytes of all units of codes and of all words of parameters that some element is in, one after the other."""
    elements = np.unique(np.concatenate([every_source(copy) for copy in copies]))
    unit = encoding.unit
    nbytes = len(np.unique(elements // unit)) * encoding.bytes_of(unit)
    rows, columns = encoding.shape[-2:]
    for parameter in encoding.parameters:
        (high, wide), (down, across) = parameter.grid, parameter.per_word
        numbers = np.arange(high * wide).reshape(high, wide) // wide // down * parameter.words[1]
        numbers += np.arange(high * wide).reshape(high, wide) % wide // across
        words = set()
        for matrix, row, column in {
            (
                e // columns // rows,
                e // columns % rows // parameter.block[0] if parameter.block[0] else None,
                e % columns // parameter.block[1] if parameter.block[1] else None,
            )
            for e in elements.tolist()
        }:
            of_element = numbers[slice(None) if row is None else row, slice(None) if column is None else column]
            words.update((matrix, word) for word in np.ravel(of_element).tolist())
        nbytes += len(words) * parameter.word_bytes
    return nbytes


def every_source(copy):
    out = np.array([copy.source])
    for size, stride, _ in copy.modes:
        out = (out[:, None] + np.arange(size) * stride).reshape(-1)
    return out


def check_counts(plan, asked, encoding, copies, staged_bytes):
    """What is planned is what was asked for, and holds what the copies need."""
    assert not plan.ranges
    assert plan.read_bytes == sum(length for _, length in (*asked.codes, *asked.parameters))
    assert plan.num_requests == len(asked.codes) + len(asked.parameters)
    assert plan.window_bytes == max(asked.memory)
    longest = coalesce._TALLEST * staged_bytes
    assert all(encoding.elements_in(access.pitch) * 4 <= longest for access in plan.windowed)
    codes = [begin + at for begin, length in asked.codes for at in range(length)]
    assert len(codes) == len(set(codes))
    assert needed(encoding, copies) <= plan.needed_bytes <= plan.read_bytes
    assert math.prod(encoding.shape) - encoding.padding == encoding.elements_in(encoding.nbytes)
