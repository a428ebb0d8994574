"""The package's exceptions, and what makes them of those of other libraries.

Every message names the file, the tensor, the expected and the found value, as far as each applies. No exception of
`json`, `struct`, `numpy` or a storage library leaves the package bare: it is the `__cause__` of one of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# Characters of a message. A file's names, shapes and JSON can be a hundred megabytes long.
_MAX_MESSAGE = 4000


class SafetensorsError(ValueError):
    """Base of every error that this package raises about a checkpoint or a request.

    ```python
    try:
        ost.load("/models/mlp", family="maxtext")
    except ost.SafetensorsError as error:
        print(error)
    ```

    A message that is too long loses its middle: the file is at its beginning, the found value at its end. It is one
    line, and what a terminal would act upon is escaped: names of files and tensors may have any characters.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(bounded(message)))


def bounded(message: str, most: int = _MAX_MESSAGE) -> str:
    """Return `message`, or its beginning and its end if it is longer than `most` characters."""
    left_out = len(message) - most
    if left_out <= 0:
        return message
    return f"{message[: most // 2]}... ({left_out} characters) ...{message[-(most // 2) :]}"


def printable(text: str) -> str:
    """Return `text` on one line, with control characters and the like escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def reason(error: BaseException) -> str:
    """Return what a message says of an error of another library: its text, or the whole error if that says nothing."""
    text = str(error)
    return repr(error) if not text.strip() or isinstance(error, KeyError) else text


class HeaderError(SafetensorsError):
    """A file is not a valid `.safetensors` file.

    ```python
    Path("/models/cut.safetensors").write_bytes(Path("/models/state/model.safetensors").read_bytes()[:-1])
    try:
        ost.open_checkpoint("/models/cut.safetensors")
    except ost.HeaderError as error:
        print(error)
    ```
    """


class IndexFileError(SafetensorsError):
    """A directory's index, or the set of files in it, does not describe one checkpoint.

    ```python
    Path("/models/broken").mkdir()
    Path("/models/broken/model.safetensors.index.json").write_text("{}")
    try:
        ost.open_checkpoint("/models/broken")  # the index names no file
    except ost.IndexFileError as error:
        print(error)
    ```
    """


class TensorMismatchError(SafetensorsError):
    """A requested name, shape or dtype differs from the stored one.

    ```python
    try:
        ost.load("/models/llama", {"model.norm.wait": jax.ShapeDtypeStruct((64,), jnp.bfloat16)})
    except ost.TensorMismatchError as error:
        print(error)
    ```
    """


class TargetTypeError(TensorMismatchError, TypeError):
    """An argument has a wrong Python type: a target, or a leaf of one, that describes no array. Also a `TypeError`."""


class RuleError(TensorMismatchError):
    """A rule of `spec`, `dtype` or `mesh` does not fit the arrays; the message begins with the argument that has it.

    ```python
    try:
        ost.reshard("/models/llama", "/models/for-8", mesh={"model": 8}, spec={"embed": ("modle", None)})
    except ost.RuleError as error:
        print(error)
    ```
    """


class UnusedArgumentError(SafetensorsError):
    """An argument of `convert` or `reshard` is not for such a source or destination; the message begins with it."""


class ChecksumError(SafetensorsError):
    """Bytes are not those whose checksum was recorded, or there is no checksum to compare them with.

    ```python
    try:
        ost.load("/models/llama", options=ost.SafetensorsOptions(checksums=True))
    except ost.ChecksumError as error:
        print(error)  # no save has recorded any
    ```
    """


class MappingError(SafetensorsError):
    """A view needs an unsupported operation, or a family does not fit the checkpoint or the tree.

    ```python
    try:
        ost.load("/models/qwen3", family="maxtest")
    except ost.MappingError as error:
        print(error)
    ```
    """


class StorageError(SafetensorsError, OSError):
    """Bytes could not be moved: missing, unreadable, truncated or changed under the reader.

    ```python
    try:
        ost.save("/models/llama", {"w": jnp.ones(4)})
    except ost.StorageError as error:
        print(error)  # the directory exists, and would be replaced with force=True
    ```
    """


class MissingError(StorageError, FileNotFoundError):
    """A file, directory, object or repository does not exist. Also a `FileNotFoundError`, as Orbax raises.

    ```python
    try:
        ost.open_checkpoint("/models/lama")
    except ost.MissingError as error:
        print(error)
    ```
    """


@contextlib.contextmanager
def storage_errors(where: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Raise errors of a `kind`, except this package's, as a `StorageError` that begins with `where`.

    TensorStore and Orbax raise whatever pybind11 and asyncio make of a status, so no narrower list of exceptions would
    be complete for them.
    """
    try:
        yield
    except SafetensorsError:
        raise
    except kind as error:
        raise StorageError(f"{where}: {reason(error)}") from error
