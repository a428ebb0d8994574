"""Makes checkpoints with the `safetensors` package, the oracle of what a file holds."""

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from etils import epath

import orbax_safetensors as ost
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.dtypes import from_numpy
from tests.support import hang

# The reference writer's names for dtypes.
_NAMES = {
    np.dtype("?"): "bool", np.dtype("u1"): "uint8", np.dtype("i1"): "int8", np.dtype("u2"): "uint16",
    np.dtype("i2"): "int16", np.dtype("u4"): "uint32", np.dtype("i4"): "int32", np.dtype("u8"): "uint64",
    np.dtype("i8"): "int64", np.dtype("f2"): "float16", np.dtype("f4"): "float32", np.dtype("f8"): "float64",
    np.dtype("c8"): "complex64", np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn", np.dtype(ml_dtypes.float8_e5m2): "float8_e5m2",
    np.dtype(ml_dtypes.float8_e8m0fnu): "float8_e8m0fnu", np.dtype(ml_dtypes.float8_e4m3fnuz): "float8_e4m3fnuz",
    np.dtype(ml_dtypes.float8_e5m2fnuz): "float8_e5m2fnuz",
}  # fmt: skip

# Every dtype that is held in whole bytes, by the name it has in a file.
DTYPES = {from_numpy(dtype).name: dtype for dtype in _NAMES}


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Any bits that `dtype` can have: NaN payloads, negative zeros and subnormals among them."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes one file with the reference writer."""
    kept = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    entries = {
        name: safetensors.TensorSpec(
            dtype=_NAMES[array.dtype], shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in kept.items()
    }
    path.write_bytes(safetensors.serialize(entries, metadata))


def write_indexed(directory: Path, parts: list[Mapping[str, np.ndarray]]) -> None:
    """Writes a directory of several files with an index, as the Hub has them."""
    weight_map = {}
    for number, tensors in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        write(directory / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(array.nbytes for tensors in parts for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


# What a save writes for Orbax beside its files.
FOR_ORBAX = frozenset(("_LINKED_FILES", "_METADATA", "_sharding", "array_metadatas", "d", "manifest.ocdbt"))


def other_names(directory: Path) -> list[str]:
    """The names in a directory, sorted, without the index that a save writes for Orbax and without its checksums."""
    return sorted(path.name for path in directory.iterdir() if path.name not in FOR_ORBAX | {CHECKSUMS_NAME})


def everything(root: Path) -> dict[str, str | bytes | bool]:
    """All names below a directory with what they are of, as a change would show; a directory is False."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in root.rglob("*")
    }


def stored_arrays(directory: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint by their stored names, whatever tree it was saved from."""
    names = ost.open_checkpoint(directory, family="identity").tensors
    args = ost.SafetensorsRestore(
        restore_args=dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray)), family="identity"
    )
    return ost.SafetensorsHandler().restore(epath.Path(directory), args)


@contextlib.contextmanager
def nothing_left(*places: str | Path) -> Iterator[None]:
    """Fails if a file at or below `places` stays open, or a thread that the package has started meanwhile runs on.

    Whatever else there is in this process, other tests may have left, and it may end at any time.
    """
    before = _opened(places)
    yield
    until = time.monotonic() + hang.SECONDS
    while (left := _opened(places) - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, f"left open: {list(left)}"


def _opened(places: tuple[str | Path, ...]) -> Counter[str | threading.Thread]:
    """Paths of open files, each as often as it is open, and threads of the package's pools."""
    opened: Counter[str | threading.Thread] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since, as that of the listing itself
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            opened[path] += path.startswith(tuple(map(str, places)))
    pools = ("safetensors", "writer", "compile", "touch")
    opened.update(thread for thread in threading.enumerate() if thread.name.startswith(pools))
    return opened
