"""Files of full-size models: published names, shapes and sizes, with holes for data."""

import gzip
import json

from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.format.layout import INDEX_NAME, lay_out
from tests.support.roots import TESTDATA

GEOMETRY = TESTDATA / "geometry"


def stored(model):
    """The tensors of a model: dtype and shape by name."""
    with gzip.open(GEOMETRY / f"{model}.json.gz") as file:
        return {name: (DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in json.load(file).items()}


def make(model, directory):
    """Writes a model into a directory, and returns that."""
    tensors = [(name, *facts) for name, facts in stored(model).items()]
    layout = lay_out(tensors, {"format": "pt"}, max_file_bytes=5 * 10**9, alignment=64)
    for name, header in layout.files:
        with (directory / name).open("wb") as file:
            file.write(header.encoded)
            file.truncate(header.file_bytes)
    if layout.index is not None:
        (directory / INDEX_NAME).write_bytes(layout.index.encode())
    (directory / "config.json").write_text((GEOMETRY / f"{model}.config.json").read_text())
    return directory
