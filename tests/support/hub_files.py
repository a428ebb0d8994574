"""The files of a repository, and how they are read."""

import os

from orbax_safetensors.storage import remote

DATA = bytes(os.urandom(2**20 + 12345))
FILES = {
    "model.safetensors": DATA,
    "config.json": b'{"a": 1}',
    "long.json": DATA[:700_000],
    "empty.json": b"",
    "sub/a b@1.safetensors": DATA[::-1],
    "sub/deep/x.txt": b"x",
}
AT = remote.HEAD_BYTES + 1000
