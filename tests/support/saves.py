"""Saves with a handler, and what they have left in a directory."""

import contextlib
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from etils import epath

import orbax_safetensors as ost
from tests.support.files import other_names

RNG = np.random.default_rng(0)
INDEX = "model.safetensors.index.json"
BF16 = np.dtype(ml_dtypes.bfloat16)


def save(directory, tree, save_args=None, metadata=None, max_file_bytes=5_000_000_000, **options):
    directory.mkdir(exist_ok=True)
    handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(**options))
    handler.save(epath.Path(directory), ost.SafetensorsSave(tree, save_args, metadata, max_file_bytes))
    return directory


def assert_same_bits(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.asarray(found).tobytes() == expected.tobytes()


def sharded(host, sharding):
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)


def content(directory):
    return {name: (directory / name).read_bytes() for name in other_names(directory)}


@contextlib.contextmanager
def temporary():
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


TREE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.int8),
    "c": {"d": np.arange(4, dtype=BF16), "e": np.float64(1.5)},
}
