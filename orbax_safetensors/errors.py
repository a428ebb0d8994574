"""The package's exceptions, and nothing else.

Every message names the file, the tensor, what was expected and what was found, as far as each applies. No exception of
`json`, `struct`, `numpy` or a storage library leaves the package bare: it is the `__cause__` of one of these.
"""


class SafetensorsError(ValueError):
    """Base of every error this package raises about a checkpoint or a request for one."""


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

    # OSError's C-level constructor would otherwise parse two arguments as (errno, strerror).
    def __init__(self, message: str) -> None:
        super().__init__(message)


class MissingError(StorageError, FileNotFoundError):
    """A file, directory, object or repository is not there; Orbax raises a `FileNotFoundError` if so."""
