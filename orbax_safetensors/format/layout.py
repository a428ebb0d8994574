"""The files that a checkpoint is written as, their names, and where each tensor lies in them.

A layout follows from names, dtypes and shapes alone, so that all processes of a program compute the same layout.
"""

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from orbax_safetensors.format.dtypes import DType, nbytes
from orbax_safetensors.format.header import PREFIX_BYTES, Header, fingerprint
from orbax_safetensors.format.index import INDEX_SUFFIX, OMITTED_FILES, SUFFIX, Index

# A stem is what the names of a model's files begin with.
STEM = "model"
FILE_NAME = f"{STEM}{SUFFIX}"
INDEX_NAME = f"{STEM}{INDEX_SUFFIX}"
# The file of a PEFT adapter, which is never cut.
ADAPTER_STEM = "adapter_model"
# Those by which `transformers`, `diffusers` and PEFT find a model in a directory.
USUAL_STEMS = (STEM, "diffusion_pytorch_model", ADAPTER_STEM)
ADAPTER_NAME = f"{ADAPTER_STEM}{SUFFIX}"
# The largest file of a model on the Hub, in bytes of tensors.
MAX_FILE_BYTES = 5_000_000_000

_NUMBERED = re.compile(r"^(.*?)((?:-\d+-of-\d+)?\.safetensors)$")

# What tells a file of several from the others, and a part of PyTorch's from other parts. A variant may follow.
_NUMBER = re.compile(r"^shard-\d+-|-\d+-of-\d+(?=(\.[^.]+)?$)")

TensorFacts = tuple[str, DType, tuple[int, ...]]  # name, dtype and shape


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint: their names and headers in order, and the index, with its name, if there are several.

    Without an index, nobody would find a file with a number either.
    """

    files: tuple[tuple[str, Header], ...]
    index: Index | None
    index_name: str = INDEX_NAME

    @cached_property
    def fingerprints(self) -> dict[str, Mapping[str, Any]]:
        """Return what tells whether the files are still the same, by the name of each file."""
        return {name: fingerprint(header.file_bytes, header.encoded[PREFIX_BYTES:]) for name, header in self.files}


def lay_out(
    tensors: Sequence[TensorFacts],
    metadata: Mapping[str, str],
    *,
    max_file_bytes: int,
    alignment: int,
    stem: str = STEM,
    group: Callable[[str], Hashable] = lambda name: None,
    omitted: Collection[str] = (),
) -> Layout:
    """Lay `tensors` out as Hugging Face does: fill one file after the other, in the order of `tensors`.

    A file holds at most `max_file_bytes` of tensors, or a single longer tensor, and names of one `group`; an adapter,
    by its `stem`, is one file. The data of a file begins at a multiple of `alignment` bytes. Every file has the same
    `metadata`. The index does not name the tensors that are `omitted`; readers take `model.safetensors` whole, so a
    single file that holds some has a number and an index. Raises `HeaderError` if a header would be invalid.
    """
    if stem == ADAPTER_STEM:
        return lay_out_files({ADAPTER_NAME: tensors}, metadata, alignment=alignment)
    groups: dict[Hashable, list[list[TensorFacts]]] = {}
    file_bytes: dict[Hashable, int] = {}
    for name, dtype, shape in tensors:
        key, size = group(name), nbytes(dtype, shape)
        files = groups.setdefault(key, [])
        if not files or file_bytes[key] + size > max_file_bytes:
            files.append([])
            file_bytes[key] = 0
        files[-1].append((name, dtype, shape))
        file_bytes[key] += size
    parts = [part for files in groups.values() for part in files] or [[]]
    named = dict(zip(file_names(len(parts), stem), parts, strict=True))
    return lay_out_files(named, metadata, alignment=alignment, index_name=f"{stem}{INDEX_SUFFIX}", omitted=omitted)


def lay_out_files(
    files: Mapping[str, Sequence[TensorFacts]],
    metadata: Mapping[str, str],
    *,
    alignment: int,
    index_name: str = INDEX_NAME,
    omitted: Collection[str] = (),
) -> Layout:
    """Lay tensors out in the files of these names, as `lay_out` does."""
    headers = [Header.layout(part, metadata, alignment=alignment) for part in files.values()]
    names = list(files)
    if len(headers) == 1 and not _NUMBER.search(names[0].removesuffix(SUFFIX)):
        if headers[0].tensors.keys().isdisjoint(omitted):
            return Layout(((names[0], headers[0]),), None)
        names = [f"{names[0].removesuffix(SUFFIX)}-00001-of-00001{SUFFIX}"]
    return _indexed(tuple(zip(names, headers, strict=True)), index_name, omitted)


def _indexed(files: tuple[tuple[str, Header], ...], index_name: str, omitted: Collection[str]) -> Layout:
    named = {tensor: name for name, header in files for tensor in header.tensors if tensor not in omitted}
    total = sum(entry.nbytes for _, header in files for name, entry in header.tensors.items() if name in named)
    metadata: dict[str, object] = {"total_size": total}
    indexed = {*named.values()}
    if unnamed := [name for name, _ in files if name not in indexed]:
        metadata[OMITTED_FILES] = unnamed
    return Layout(files, Index(named, metadata), index_name)


def avoiding(layout: Layout, taken: Collection[str]) -> Layout:
    """Return the layout with `free_names` of its files."""
    if layout.index is None:
        return layout
    names = dict(zip((old := [name for name, _ in layout.files]), free_names(old, taken), strict=True))
    omitted = {name for _, header in layout.files for name in header.tensors if name not in layout.index.weight_map}
    return _indexed(tuple((names[name], header) for name, header in layout.files), layout.index_name, omitted)


def file_stem(name: str) -> str:
    """Return the name of a file without its suffix and its number: `model`, or `model.fp16` of a variant."""
    return _NUMBER.sub("", name.removesuffix(SUFFIX))


def free_names(names: Sequence[str], taken: Collection[str]) -> list[str]:
    """Return `names`, or if one of them is `taken`, others: `model-v2-00001-of-00002.safetensors`, and so on."""
    version, free = 1, list(names)
    while not {*taken}.isdisjoint(free):
        version += 1
        free = [_NUMBERED.sub(rf"\1-v{version}\2", name) for name in names]
    return free


def file_names(count: int, stem: str = STEM) -> list[str]:
    """Return the names of the files of a checkpoint."""
    if count == 1:
        return [f"{stem}{SUFFIX}"]
    return [f"{stem}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
