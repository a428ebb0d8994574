"""`model.safetensors.index.json`: which file of a directory holds which tensor.

Nothing here looks at the directory: the reader of the files finds out if they exist and hold their tensors.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orbax_safetensors.errors import IndexFileError
from orbax_safetensors.format import strict_json
from orbax_safetensors.format.header import shown

SUFFIX = ".safetensors"
"""How the name of every file of tensors ends."""

INDEX_SUFFIX = f"{SUFFIX}.index.json"
"""How the name of every index ends; the usual name is `model.safetensors.index.json`."""

OMITTED_FILES = "omitted_files"
"""The key of an index's metadata for files that hold only tensors which the index does not name."""

# With a variant, before the suffix as older programs have it, or after `index` as `transformers` and `diffusers` do.
_NAME = re.compile(r"(.+)\.safetensors\.index(\.[^.]+)?\.json")


def is_index(name: str) -> bool:
    """Return whether a file, by its name or path, is the index of a checkpoint, or of a variant of one."""
    return _NAME.fullmatch(name) is not None


def index_stem(name: str) -> str:
    """Return the name of an index without what all indexes have in theirs: `model`, or `model.fp16` of a variant."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return match[1] + (match[2] or "")


@dataclass(frozen=True)
class Index:
    """The facts of an index. The constructor checks them, so that no file name leads out of the directory.

    weight_map: tensor name -> plain name of a file beside the index.
    metadata: free; only `OMITTED_FILES` and what `delta_of` reads mean something here.

    Raises IndexFileError, without the index's name, which only `parse` knows.
    """

    weight_map: Mapping[str, str]
    metadata: Mapping[str, object]

    def __post_init__(self) -> None:
        if not isinstance(self.weight_map, Mapping):
            raise IndexFileError(f"weight_map: expected an object, found {shown(self.weight_map)}")
        if not isinstance(self.metadata, Mapping):
            raise IndexFileError(f"metadata: expected an object, found {shown(self.metadata)}")
        checked: set[str] = set()  # a few hundred files hold tens of thousands of tensors
        for tensor, name in self.weight_map.items():
            if type(name) is not str or name not in checked:
                check_file_name(name, file=f"weight_map: tensor {shown(tensor)}")
                checked.add(name)
        for name in self._omitted_files:
            check_file_name(name, file="omitted_files")
        # Read-only copies: checked values stay as they were.
        object.__setattr__(self, "weight_map", MappingProxyType(dict(self.weight_map)))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the files, each once, sorted."""
        return tuple(sorted({*self.weight_map.values(), *self._omitted_files}))

    @property
    def delta_of(self) -> str | None:
        """Return the number of the version that the files change; None if they are a checkpoint, and not a delta."""
        if "delta_encoding" not in self.metadata:
            return None
        return str(self.metadata.get("base_version")).lstrip("0")[:20] or "0"

    @property
    def _omitted_files(self) -> list[str]:
        names = self.metadata.get(OMITTED_FILES)
        return names if isinstance(names, list) else []

    @classmethod
    def parse(cls, text: bytes, *, file: str) -> "Index":
        """Return the index whose whole text is `text`; `file` is for messages. Raises IndexFileError."""
        try:
            document = strict_json.parse(text)
            if not isinstance(document, dict):
                raise IndexFileError(f"expected a JSON object, found {shown(document)}")
            if "unfinished" in document:
                raise IndexFileError("is of a save or a conversion that is at work, or was interrupted")
            if "weight_map" not in document:
                raise IndexFileError("expected a weight_map, found none")
            metadata = document.get("metadata")
            return cls(document["weight_map"], metadata if isinstance(metadata, dict) else {})
        except ValueError as error:  # IndexFileError is a subclass
            raise IndexFileError(f"{file}: {error}") from error

    def encode(self) -> bytes:
        """Return the index as `save_pretrained` writes it: sorted, indented by two, ASCII, a newline at the end.

        Raises IndexFileError if the metadata is not JSON.
        """
        document = {"metadata": dict(self.metadata), "weight_map": dict(self.weight_map)}
        try:
            text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise IndexFileError(f"metadata: expected what JSON can hold: {error}") from error
        return f"{text}\n".encode()


def check_file_name(name: str, *, file: str) -> None:
    """Check that `name`, from the index `file`, is the plain name of a `.safetensors` file beside the index.

    Judges the string and does not follow links: Hugging Face's caches consist of symlinks out of the directory.
    Raises IndexFileError for a path, a URL, a hidden or unprintable name, or a value that is not a name at all.
    """
    if type(name) is not str:
        raise IndexFileError(f"{file}: expected the name of a file, found {shown(name)}")
    # A colon ends a scheme or a Windows drive. What is not printable may look like another name.
    is_plain = name.isprintable() and not any(part in name for part in ("/", "\\", "..", ":"))
    if not is_plain or name.startswith(".") or not name.endswith(SUFFIX):
        raise IndexFileError(f"{file}: expected one plain file name that ends in {SUFFIX}, found {shown(name)}")
