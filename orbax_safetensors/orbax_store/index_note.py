"""The note beside an index: sizes and digests that tell whether its files have changed, and how a tree was saved.

An index has addresses, which are wrong once a file changes. Orbax and TensorStore cannot notice that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.format import strict_json
from orbax_safetensors.storage.store import File, Store, find_small

# `{"files": {name: {"nbytes": ..., "header_sha256": ...}}, "names_tensors": ..., "index": {name: sha256}}`, and
# `"saved": {...}` from a save or `"linked": {...}` from a link, each with `"family"` and `"variant"`.
NOTE_FILE = "_LINKED_FILES"

_FACTS = ("nbytes", "header_sha256")  # of each file; later versions may have noted more

_MAX_BYTES = 64 * 2**20
_MAX_INDEX_BYTES = 2**30
_PIECE_BYTES = 2**20  # of a file that is hashed


def note_content(
    files: Mapping[str, Mapping[str, Any]],
    names_tensors: bool,
    index: Mapping[str, bytes],
    *,
    saved: Mapping[str, Any] | None = None,
    linked: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the content of `NOTE_FILE`, given the `fingerprint` of each file; see `IndexNote` for the others.

    `index` are files of the index whose content nobody changes, by name.
    """
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in index.items()}
    made_by = {name: record for name, record in (("saved", saved), ("linked", linked)) if record is not None}
    return json.dumps({"files": files, "names_tensors": names_tensors, "index": digests} | made_by, indent=1).encode()


@dataclass(frozen=True)
class IndexNote:
    """The content of `NOTE_FILE`.

    Attributes:
      files: the `fingerprint` of each file, by name.
      names_tensors: whether the names of arrays in the index are those of the tensors in the files.
      index: the SHA-256 of files of the index, by name; none if Orbax or an earlier version wrote them.
      saved: the family and the variant with which the tree was saved; None for a link.
      linked: those of a link; None for a save.
    """

    files: Mapping[str, Mapping[str, Any]]
    names_tensors: bool
    index: Mapping[str, str]
    saved: Mapping[str, Any] | None
    linked: Mapping[str, Any] | None

    @property
    def use(self) -> Mapping[str, Any] | None:
        """Return the family and the variant of the tree; None if it is that of the stored names."""
        record = self.saved or self.linked or {}
        return record if record.get("family") else None

    def changed(
        self, directory: str, present: Mapping[str, Mapping[str, Any]], *, partial: bool = False
    ) -> list[StorageError]:
        """Return an error for each file in a directory that is no longer the one that the index was made of.

        `present` are the fingerprints of the files that are there, by name; if `partial`, others may be missing.
        """
        since = "link: link again" if self.saved is None else "save"
        faults = []
        for name, expected in self.files.items():
            found = present.get(name)
            if found == expected or (partial and found is None):
                continue
            why = "the checkpoint has no such file"
            if found is not None:
                differs = "header" if found["nbytes"] == expected["nbytes"] else "size"
                why = f"its {differs} has changed since the {since}"
            faults.append(StorageError(f"{posixpath.join(directory, name)}: does not fit the index beside it: {why}"))
        return faults

    def altered(self, store: Store, directory: str) -> Iterator[StorageError]:
        """Yield an error for each file of the index in a directory that is missing or not what was written."""
        for name, digest in self.index.items():
            path = posixpath.join(directory, name)
            if (file := store.find(path)) is None:
                yield MissingError(f"{path}: is missing, and the index has it")
                continue
            # Its digest is not shown: a link may lead to a file that is nobody's business.
            if _sha256(file) != digest:
                yield StorageError(f"{path}: has changed since the index was written: expected SHA-256 {digest!r:.80}")


def _sha256(file: File) -> str:
    """Return the digest of a file of an index, and close the file; `StorageError` if it is too long for one."""
    with contextlib.closing(file):
        nbytes, digest = file.stamp.nbytes, hashlib.sha256()
        if nbytes > _MAX_INDEX_BYTES:
            raise StorageError(f"{file.path}: expected at most {_MAX_INDEX_BYTES} bytes, found {nbytes}")
        buffer = memoryview(bytearray(min(nbytes, _PIECE_BYTES)))
        for begin in range(0, nbytes, _PIECE_BYTES):
            piece = buffer[: nbytes - begin]
            file.read([(begin, [piece])])
            digest.update(piece)
        return digest.hexdigest()


def _check_name(name: str) -> None:
    """Raise ValueError if the name of a file leads out of the directory of its note: `verify` reads what it names."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.replace("\\", "/").split("/")):
        raise ValueError(f"expected the name of a file in the directory, found {name!r:.80}")


def read_note(store: Store, directory: str) -> IndexNote | None:
    """Return the note beside the index in a directory, or None if there is none.

    Raises `StorageError` if it cannot be read.
    """
    path = posixpath.join(directory, NOTE_FILE)
    if (content := find_small(store, path, _MAX_BYTES)) is None:
        return None
    try:
        document = strict_json.loads(content)
        files, names_tensors = document["files"], document["names_tensors"]
        index = document.get("index", {})
        if not (isinstance(files, dict) and type(names_tensors) is bool and isinstance(index, dict)):
            raise TypeError(f"expected dicts, found {document!r:.80}")
        made_by = [document.get("saved"), document.get("linked")]
        for record in made_by:
            if not isinstance(record, dict | None):
                raise TypeError(f"expected dicts, found {document!r:.80}")
            family, variant = (record or {}).get("family"), (record or {}).get("variant")
            if not isinstance(family, str | None) or not isinstance(variant, dict | None):
                raise TypeError(f"expected a name and a dict, found {record!r:.80}")
        for name in (*files, *index):
            _check_name(name)
        for facts in files.values():
            if not facts.keys() >= set(_FACTS):
                raise TypeError(f"expected the size and the digest of the header of each file, found {facts!r:.80}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path}: is not what a link or a save has written: {error!r:.200}") from error
    files = {name: {fact: facts[fact] for fact in _FACTS} for name, facts in files.items()}
    return IndexNote(files, names_tensors, index, *made_by)
