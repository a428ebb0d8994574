"""The package's exceptions, and nothing else.

Every message names the file, the tensor, what was expected and what was found, as far as each applies. No exception of
`json`, `struct`, `numpy` or a storage library leaves the package bare: it is the `__cause__` of one of these.
"""

# Characters of a message. Names, shapes and JSON of a file can be a hundred megabytes long.
_MAX_MESSAGE = 4000


class SafetensorsError(ValueError):
    """Base of every error this package raises about a checkpoint or a request for one.

    A message that is too long loses its middle: it begins with the file and ends with what was found.
    """

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


def bounded(message: str, most: int = _MAX_MESSAGE) -> str:
    """Return `message`, or its beginning and its end where it is longer than `most` characters."""
    left_out = len(message) - most
    if left_out <= 0:
        return message
    return f"{message[: most // 2]}... ({left_out} characters) ...{message[-(most // 2) :]}"


class HeaderError(SafetensorsError):
    """A file is not a valid `.safetensors` file."""


class IndexFileError(SafetensorsError):
    """A directory's index, or the set of files in it, does not describe one checkpoint."""


class TensorMismatchError(SafetensorsError):
    """A name, shape or dtype that was asked for is not what is stored."""


class MappingError(SafetensorsError):
    """A view of stored tensors cannot be expressed, or does not cover what it should."""


class StorageError(SafetensorsError, OSError):
    """Bytes could not be moved: missing, unreadable, truncated or changed under the reader."""


class MissingError(StorageError, FileNotFoundError):
    """A file, directory, object or repository is not there; Orbax raises a `FileNotFoundError` if so."""
