"""Executes what is gathered of a quantised tensor, as a restore does and slowly, and records what it asks for."""

from dataclasses import dataclass, field

import numpy as np

from orbax_safetensors.geometry.coalesce import Encoded, gather_encoded
from orbax_safetensors.geometry.view import Taken, View
from orbax_safetensors.transfer.decode import decode
from tests.support import views


@dataclass
class Asked:
    """Ranges `(begin, length)` in bytes of the codes and of the scales, and the memory of every window."""

    codes: list = field(default_factory=list)
    scales: list = field(default_factory=list)
    memory: list = field(default_factory=list)


def execute(gathered, codes, scales, destinations):
    """Fills a destination for every copy that was gathered, from the bytes of both tensors."""
    asked = Asked()
    for access in gathered.windowed:
        assert isinstance(access, Encoded)
        per_byte = access.encoding.elements_per_byte
        for low in range(0, access.runs.nbytes, access.pitch):
            high = min(low + access.pitch, access.runs.nbytes)
            needed = access.scales(low, high)
            pieces = list(access.runs.pieces(low, high))
            asked.codes += pieces
            asked.scales += needed.ranges
            packed = [read(codes, pieces), read(scales, needed.ranges)]
            decoded = np.empty((high - low) * per_byte, np.float32)
            decode(access.encoding, needed.segments, *packed, decoded)
            asked.memory.append(decoded.nbytes + packed[0].nbytes + packed[1].nbytes)
            first = low * per_byte
            for use in access.uses:
                for copy in use.copy.within(first, high * per_byte):
                    views.run([Taken("t", copy.shifted(-first), ())], {"t": decoded}, destinations[use.buffer])
    return asked


def read(source, ranges):
    assert all(0 <= begin < begin + length <= source.size for begin, length in ranges)
    return np.concatenate([source[begin : begin + length] for begin, length in ranges])


def box_of(encoding, codes, scales, box, max_gap_bytes=0):
    """A box of the decoded tensor, as float32."""
    shape = [stop - start for start, stop in box]
    out = np.empty(shape, np.float32)
    taken = View.tensor("t", encoding.shape, out.dtype).copies(box, shape)
    if taken:
        gathered = gather_encoded(tuple((copy, False) for _, copy, _ in taken), encoding, max_gap_bytes)
        execute(gathered, codes.reshape(-1).view(np.uint8), scales.reshape(-1).view(np.uint8), [out] * len(taken))
    return out
