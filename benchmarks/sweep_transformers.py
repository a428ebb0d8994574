"""Every model type of the installed `transformers`: loaded, sharded, saved and loaded by `from_pretrained` again.

    python benchmarks/sweep_transformers.py [--only TYPE ...] [--directory DIR] [--json FILE]

For each type, `tiny_models.py` makes a random model, which saves itself. This package loads the files, whole and over 8
simulated devices; the bits have to be those that the `safetensors` package reads. It saves the sharded arrays with
`like=` and the others with `config=`. Both have to hold the same tensors again, and `from_pretrained` has to make the
same model of the former. Types of which `transformers` makes no small model here are listed with the reason.

Takes about a second for each type. A type that takes too long, or ends the process, is a failure, and the sweep goes
on in another process.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
import tiny_models
import torch
import transformers
from checkpoints import add_directory
from safetensors.torch import load_file

import orbax_safetensors as ost

EQUAL, NOT_MADE, FAILED = "equal", "not made", "failed"
SECONDS = 120  # for one type
TYPES_PER_PROCESS = 100  # modules of `transformers` stay imported
_SHOWN = 5


class Different(Exception):
    """What was read is not what was written; the text says what and where."""


@dataclass(frozen=True)
class Outcome:
    """What became of a model type.

    Attributes:
      model_type: as `config.json` names it.
      status: `EQUAL`, `NOT_MADE` or `FAILED`.
      detail: the reason if the status is not `EQUAL`, otherwise what is to be known beside.
      model: the class.
      parameters, tensors, sharded: their number, that of stored tensors, and of those that were cut among devices.
      seconds: that all of it took.
    """

    model_type: str
    status: str
    detail: str = ""
    model: str = ""
    parameters: int = 0
    tensors: int = 0
    sharded: int = 0
    seconds: float = 0.0


def sweep(model_type: str, directory: Path) -> Outcome:
    """Make a model of a type and take it through this package; `directory` is empty and holds its files after."""
    begun = time.perf_counter()
    try:
        model = tiny_models.make(model_type, directory / "first")
    except tiny_models.NotMade as error:
        return Outcome(model_type, NOT_MADE, str(error))
    parameters = sum(tensor.numel() for tensor in model.parameters())
    try:
        tensors, sharded, detail = moved(model, directory)
    except Exception as error:
        return Outcome(
            model_type, FAILED, tiny_models.text(type(model).__name__, error), type(model).__name__, parameters
        )
    seconds = time.perf_counter() - begun
    return Outcome(model_type, EQUAL, detail, type(model).__name__, parameters, tensors, sharded, seconds)


def moved(model: Any, directory: Path) -> tuple[int, int, str]:
    """Load, shard, save and load again what a model has saved as `first`.

    Returns how many tensors are stored, how many of them were cut, and a note; raises `Different`, or what the package
    or `transformers` raises.
    """
    first, second, third = (directory / name for name in ("first", "second", "third"))
    stored = stored_tensors(first)
    plain = ost.load(first)
    check("load", plain, stored)
    arrays = ost.load(first, mesh())
    check("load over 8 devices", arrays, stored)
    ost.save(second, arrays, like=first)
    check("save like=", stored_tensors(second), stored)
    ost.save(third, plain, config=model.config)
    check("save config=", stored_tensors(third), stored)
    detail = same_model(model, first, second)
    return len(stored), sum(not array.sharding.is_fully_replicated for array in arrays.values()), detail


def same_model(model: Any, first: Path, second: Path) -> str:
    """Check that `from_pretrained` makes the model of `second`; returns a note if it does not even do so of `first`."""
    try:
        check("from_pretrained", pretrained(model, second), model.state_dict())
    except Exception:
        try:
            expected = pretrained(model, first)
        except Exception as error:
            return tiny_models.text("from_pretrained does not load what save_pretrained has written", error)
        check("from_pretrained", pretrained(model, second), expected)
        return "from_pretrained makes another model also of what save_pretrained has written"
    return ""


def pretrained(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's class, loaded from a directory."""
    torch.manual_seed(1)  # what the files lack is random
    found: dict[str, torch.Tensor] = (
        type(model).from_pretrained(directory, local_files_only=True, dtype="auto").state_dict()
    )
    return found


def mesh() -> jax.sharding.Mesh:
    """Return all devices, in a line."""
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory by name, as the `safetensors` package reads them."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check(what: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise `Different` unless the names, dtypes, shapes and bits of two models are the same."""
    if found.keys() != expected.keys():
        missing, more = expected.keys() - found.keys(), found.keys() - expected.keys()
        raise Different(f"{what}: missing {sorted(missing)[:_SHOWN]}, unexpected {sorted(more)[:_SHOWN]}")
    different = [name for name, tensor in expected.items() if bits(found[name]) != bits(tensor)]
    if different:
        raise Different(f"{what}: {len(different)} of {len(expected)} differ: {sorted(different)[:_SHOWN]}")


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return the dtype, shape and bytes of an array of NumPy, JAX or PyTorch."""
    dtype, shape = str(array.dtype).removeprefix("torch."), tuple(array.shape)
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return dtype, shape, np.asarray(array).tobytes()


class Worker:
    """A process that takes one type after the other."""

    def __init__(self, directory: Path | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, directory), daemon=True)
        self._process.start()
        end.close()
        self.done = 0

    def sweep(self, model_type: str) -> Outcome:
        """Return what becomes of a type; the process ends if that takes too long."""
        self._pipe.send(model_type)
        self.done += 1
        try:
            if self._pipe.poll(SECONDS):
                outcome: Outcome = self._pipe.recv()
                return outcome
        except EOFError:
            self._process.join()
            return Outcome(model_type, FAILED, f"the process ended with {self._process.exitcode}")
        self.end()
        return Outcome(model_type, FAILED, f"took more than {SECONDS} s")

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, parent: Path | None) -> None:
    quiet()
    while True:
        model_type = pipe.recv()
        with tempfile.TemporaryDirectory(dir=parent) as directory:
            pipe.send(sweep(model_type, Path(directory)))


def quiet() -> None:
    """Leave out what `transformers` has to say about models that nobody will use, and JAX's limit to 32 bits."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)  # threads wait for each other where others compute


def outcomes(model_types: Iterable[str], directory: Path | None) -> Iterator[Outcome]:
    """Take types through a process of their own, one after the other."""
    worker = Worker(directory)
    try:
        for model_type in model_types:
            if not worker.alive or worker.done == TYPES_PER_PROCESS:
                worker.end()
                worker = Worker(directory)
            yield worker.sweep(model_type)
    finally:
        worker.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types, as config.json names them")
    add_directory(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    known = tiny_models.types()
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"transformers {transformers.__version__} has no models of type {', '.join(sorted(unknown))}")
    selected = args.only or known
    found = []
    for number, outcome in enumerate(outcomes(selected, args.directory), 1):
        found.append(outcome)
        print(
            f"{number}/{len(selected)} {outcome.model_type} {outcome.model}: {outcome.status} {outcome.detail}".rstrip()
        )
        sys.stdout.flush()
    counts = collections.Counter(outcome.status for outcome in found)
    cut = sum(outcome.sharded > 0 for outcome in found)
    print(f"\n{len(found)} model types of transformers {transformers.__version__}: {counts[EQUAL]} equal, with tensors")
    print(f"cut among devices in {cut} of them; {counts[NOT_MADE]} not made, {counts[FAILED]} failed")
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in found], indent=1))
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
