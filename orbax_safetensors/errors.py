"""The package's exceptions, and nothing else.

Every message names the file, the tensor, the expected and the found value, as far as each applies. No exception of
`json`, `struct`, `numpy` or a storage library leaves the package bare: it is the `__cause__` of one of these.
"""

# Characters of a message. A file's names, shapes and JSON can be a hundred megabytes long.
_MAX_MESSAGE = 4000


class SafetensorsError(ValueError):
    """Base of every error that this package raises about a checkpoint or a request.

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


class HeaderError(SafetensorsError):
    """A file is not a valid `.safetensors` file."""


class IndexFileError(SafetensorsError):
    """A directory's index, or the set of files in it, does not describe one checkpoint."""


class TensorMismatchError(SafetensorsError):
    """A requested name, shape or dtype differs from the stored one."""


class TargetTypeError(TensorMismatchError, TypeError):
    """A target, or a leaf of one, is of a Python type that describes no array. Also a `TypeError`."""


class ChecksumError(SafetensorsError):
    """Bytes are not those whose checksum was recorded, or there is no checksum to compare them with."""


class MappingError(SafetensorsError):
    """A view of stored tensors cannot be expressed, or does not cover all that it has to."""


class StorageError(SafetensorsError, OSError):
    """Bytes could not be moved: missing, unreadable, truncated or changed under the reader."""


class MissingError(StorageError, FileNotFoundError):
    """A file, directory, object or repository does not exist. Also a `FileNotFoundError`, as Orbax raises."""
