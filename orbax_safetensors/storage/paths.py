"""Paths and URLs as text; every path that a user gives comes by here."""

from __future__ import annotations

import os
import re

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage import hub_path

PathLike = str | os.PathLike[str]

S3 = ("s3", "s3a")
GCS = ("gs",)
AZURE = ("az", "azure", "abfs", "abfss", "adl")
HTTP = ("http", "https")
HUB = (hub_path.SCHEME,)
SCHEMES = (*S3, *GCS, *AZURE, *HTTP, *HUB)

_COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)(.*)", re.DOTALL)


def as_text(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """A path or URL; `StorageError` where it is what `pathlib` has made of a URL, a path with one slash less."""
    text = os.fsdecode(path)
    if found := _COLLAPSED.fullmatch(text):
        scheme, rest = found.groups()
        raise StorageError(
            f"{shown(text)}: is what pathlib makes of {shown(f'{scheme}://{rest}')}; pass a URL as a str, and a path "
            f"that begins so as ./{shown(text)}"
        )
    return text


def shown(path: str) -> str:
    """Return a path as messages have it: a URL without its query, user and password."""
    found = _COLLAPSED.fullmatch(path)
    if not is_url(path) and not found:
        return path
    return re.sub(r"^(\w+:/+)[^/?]*@", r"\1", path).partition("?")[0]


def is_url(path: str) -> bool:
    """Whether a path is a URL, of whatever scheme."""
    return "://" in path


def place(path: PathLike) -> str:
    """An absolute path, or a URL as it is but for a slash at its end; `StorageError` where there is none."""
    path = as_text(path)
    if is_url(path):
        scheme, _, rest = path.partition("://")
        if scheme in SCHEMES and not rest.partition("/")[0]:
            raise StorageError(f"{path}: expected a name after {scheme}://")
        return path.rstrip("/")
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise StorageError(f"{path}: is in the working directory, which was deleted") from error
