"""`check_by_reference`: what the `safetensors` package, the format's reference, says of a header."""

from __future__ import annotations

import json
import logging
import os
from functools import lru_cache

import safetensors

from orbax_safetensors.errors import HeaderError, printable
from orbax_safetensors.format.dtypes import DType
from orbax_safetensors.format.header import PREFIX_BYTES, Header

logger = logging.getLogger(__name__)


def check_by_reference(header: Header, text: bytes, *, file: str) -> None:
    """Raise `HeaderError` if the `safetensors` package refuses a file whose header is `header`, as JSON `text`.

    The package opens local files only, and maps them. So it gets a file in memory that has the header, and a hole for
    the data: no data is read, wherever `file` is, and nobody can cut short what is mapped. An older version is not
    asked about dtypes that it does not know.
    """
    try:
        _open(text, header.data_bytes)
    except safetensors.SafetensorError as error:
        if all(_is_known(dtype) for dtype in {entry.dtype for entry in header.tensors.values()}):
            who = f"the safetensors package {safetensors.__version__}"
            raise HeaderError(f"{file}: {who} refuses it: {error}") from error
    except (OSError, MemoryError) as error:  # a limit of this process: it says nothing of the file
        logger.warning("%s: the safetensors package did not check it: %s", printable(file), error)


@lru_cache
def _is_known(dtype: DType) -> bool:
    """Return whether the installed `safetensors` package has a dtype."""
    entry = {"dtype": dtype.name, "shape": [8], "data_offsets": [0, dtype.bits]}
    try:
        _open(json.dumps({"": entry}).encode(), dtype.bits)
    except safetensors.SafetensorError:
        return False
    return True


def _open(text: bytes, data_bytes: int) -> None:
    """Have the `safetensors` package open a file with a header and a hole for its data, and close it."""
    with open(os.memfd_create("safetensors"), "wb") as file:
        file.write(len(text).to_bytes(PREFIX_BYTES, "little") + text)
        file.truncate(PREFIX_BYTES + len(text) + data_bytes)
        with safetensors.safe_open(f"/proc/self/fd/{file.fileno()}", framework="np"):
            pass
