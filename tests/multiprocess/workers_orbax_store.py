"""What the tests of Orbax sinks run in other processes: sinks that several share, and sinks that end in a SIGKILL.

Run as a module, this file is one sink that kills its process: arguments are a directory, the step of the work at which
that happens, and options in JSON. It prints the boxes of the tiles that were done before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from orbax_safetensors.devices.agreement import agree
from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.orbax_store import OrbaxLeaf, item_writer, named_sharding, open_orbax
from tests.support.sinks import AnySink, missing, step_sink

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)

# Arrays by name: dtype, shape, chunk shape, and spec over a mesh of eight.
ARRAYS: dict[str, tuple[np.dtype, tuple[int, ...], tuple[int, ...], tuple[str | None, ...]]] = {
    "params.kernel": (BF16, (64, 40), (8, 40), ("x",)),
    "params.table": (F32, (16, 64), (16, 8), (None, "x")),
    "params.uneven": (F32, (13, 9), (4, 5), ()),
    "params.scale": (BF16, (), (), ()),
}


def values() -> dict[str, np.ndarray]:
    """The same in every process."""
    return {
        name: np.random.default_rng(number).standard_normal(shape).astype(dtype)
        for number, (name, (dtype, shape, _, _)) in enumerate(ARRAYS.items())
    }


def tree() -> dict[str, Any]:
    leaves = {
        name.split(".")[1]: OrbaxLeaf(shape, dtype, chunks, sharding=named_sharding((("x", 8),), spec))
        for name, (dtype, shape, chunks, spec) in ARRAYS.items()
    }
    return {"step": 3, "params": leaves, "opt_state": {}}


def tiles(sink: AnySink) -> list[tuple[str, Any]]:
    """All that are missing, in the same order in every process."""
    return [(name, box) for name in sorted(sink.leaves) for box in missing(sink, name)]


def write(sink: AnySink, own: list[tuple[str, Any]]) -> None:
    arrays = values()
    for name, box in own:
        sink.write_box(name, box, arrays[name][(*(slice(*ends) for ends in box), ...)])


SCENARIOS: dict[str, Callable[[Path], Any]] = {}


def scenario(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    SCENARIOS[function.__name__] = function
    return function


def run(root: str) -> dict[str, Any]:
    """All scenarios one after the other, each in a directory of its own."""
    return {name: function(Path(root, name)) for name, function in SCENARIOS.items()}


def failed(do: Callable[[], Any]) -> str:
    try:
        do()
    except (StorageError, TensorMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def dealt(sink: AnySink) -> list[tuple[str, Any]]:
    return tiles(sink)[jax.process_index() :: jax.process_count()]


def _written(root: Path | str, **options: Any) -> list[str]:
    with step_sink(root, tree(), custom_metadata={"scan_layers": True}, **options) as sink:
        own = dealt(sink)
        write(sink, own)
        sink.commit()
    checkpoint = open_orbax(root)  # it is there, in every process
    assert checkpoint.custom_metadata == {"scan_layers": True}
    return [f"{name} {box}" for name, box in own]


@scenario
def ocdbt_zarr3(root: Path) -> Any:
    return _written(root)


@scenario
def files_zarr2(root: Path) -> Any:
    return _written(root, ocdbt=False, zarr3=False)


def remote(url: str) -> dict[str, Any]:
    """Below a URL, where processes share no file system; before, half of it was written and given up."""
    found = {}
    for ocdbt in (True, False):
        name = f"{ocdbt=}"
        with step_sink(f"{url}/{name}", tree(), custom_metadata={"scan_layers": True}, ocdbt=ocdbt) as sink:
            write(sink, dealt(sink)[::2])
            agree(f"all have written {name}", None)
        failed(lambda name=name: open_orbax(f"{url}/{name}"))
        found[name] = _written(f"{url}/{name}", resume=True, ocdbt=ocdbt)
    return found


@scenario
def the_last_process_writes_nothing(root: Path) -> Any:
    with step_sink(root, tree()) as sink:
        if jax.process_index() < jax.process_count() - 1:
            write(sink, tiles(sink)[jax.process_index() :: jax.process_count() - 1])
        sink.commit()


@scenario
def a_tile_that_nobody_writes(root: Path) -> Any:
    with step_sink(root, tree()) as sink:
        write(sink, [tile for tile in dealt(sink) if tile[0] != "params.scale"])
        return failed(sink.commit)


@scenario
def the_last_process_gives_up(root: Path) -> Any:
    def work() -> None:
        with step_sink(root, tree()) as sink:
            if jax.process_index() == jax.process_count() - 1:
                raise StorageError("the source is gone")
            name, box = tiles(sink)[0]
            while True:  # the others learn of it while they write
                write(sink, [(name, box)])

    return failed(work)


@scenario
def the_first_process_cannot_finish(root: Path) -> Any:
    def work() -> None:
        with step_sink(root, tree()) as sink:
            write(sink, dealt(sink))
            sink.workspace.finish = fail  # type: ignore[method-assign]
            sink.commit()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    return failed(work)


@scenario
def a_step_that_is_there(root: Path) -> Any:
    if jax.process_index() == 0:
        (root / "0").mkdir(parents=True)
    return failed(lambda: step_sink(root, tree()))


@scenario
def taken_up_again(root: Path) -> Any:
    """The first attempt loses what the last process was to write."""
    with step_sink(root, tree()) as sink:
        if jax.process_index() < jax.process_count() - 1:
            write(sink, dealt(sink))
        agree("written in part", None)  # who leaves first tells the others to give up
    with step_sink(root, tree(), resume=True) as sink:
        missing = tiles(sink)
        write(sink, dealt(sink))
        sink.commit()
    return [f"{name} {box}" for name, box in missing]


def die_together(root: str) -> None:
    """The last process is killed once all that the others have to write is done."""
    with step_sink(root, tree()) as sink:
        own = dealt(sink)
        last = jax.process_index() == jax.process_count() - 1
        write(sink, own[: len(own) // 2] if last else own)
        agree("killed", None)
        if last:
            kill()
        sink.commit()


# Sinks that end in a SIGKILL.


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, when: str, options: str) -> None:
    keywords = json.loads(options)
    if when == "after the merge":
        item_writer.ItemWriter._check_whole = kill  # type: ignore[method-assign]
    left = int(when) if when.isdigit() else sys.maxsize
    arrays = values()
    with step_sink(directory, tree(), **keywords) as sink:
        for name, box in tiles(sink):
            if left == 0:
                kill()
            sink.write_box(name, box, arrays[name][(*(slice(*ends) for ends in box), ...)])
            os.write(1, f"{json.dumps([name, box])}\n".encode())
            left -= 1
        sink.commit()
    os.write(2, b"survived\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
