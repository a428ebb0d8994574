"""PyTorch's sharded files: pieces of tensors that are put together."""

import json

import numpy as np

from tests.support.files import random_bits, write

RNG = np.random.default_rng(0)
ROWS = random_bits(RNG, (10, 6), np.dtype("f4"))
COLUMNS = random_bits(RNG, (4, 9), np.dtype("f2"))
GRID = random_bits(RNG, (6, 8), np.dtype("i4"))
SCALAR = random_bits(RNG, (), np.dtype("f4"))
EMPTY = np.zeros((0, 3), np.float32)
WHOLE = {"rows": ROWS, "columns": COLUMNS, "grid": GRID, "scalar": SCALAR, "empty": EMPTY}
# For each file the pieces in it, as (name, offsets, array).
PIECES = [
    [
        ("rows", (0, 0), ROWS[:4]), ("columns", (0, 5), COLUMNS[:, 5:]), ("scalar", (), SCALAR),
        ("grid", (0, 0), GRID[:2]), ("empty", (0, 0), EMPTY),
    ],
    [("rows", (4, 0), ROWS[4:]), ("columns", (0, 0), COLUMNS[:, :5]), ("grid", (2, 0), GRID[2:, :3])],
    [("grid", (2, 3), GRID[2:, 3:]), ("rows", (10, 0), ROWS[10:])],
]  # fmt: skip


def write_pieces(directory, pieces, version="1.0"):
    for number, own in enumerate(pieces, 1):
        information = json.dumps({name: {"saved_offsets": list(start)} for name, start, _ in own})
        metadata = {"format": "pt", "DCP_VERSION": version, "DCP_SHARDING_INFO": information}
        path = directory / f"shard-{number:05}-model-00001-of-00001.safetensors"
        write(path, {name: array for name, _, array in own}, metadata)
