"""What `test_link.py` runs in several processes: links that all of them make, and links that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

import orbax_safetensors as ost
from orbax_safetensors.link import link_job
from tests.multiprocess.workers_save import error_of
from tests.support.link_models import FAMILY
from tests.support.roots import TESTDATA

DATA = TESTDATA / "maxtext"
# With leaves that have to be made, and without any.
SAMPLES = ("gemma2", "deepseek3")


def run(root: str) -> dict[str, Any]:
    """For each link what it made and what this process has made of it; for each failure its message."""
    out: dict[str, Any] = {}
    for sample in SAMPLES:
        out[sample] = _linked(DATA / sample / "hf", Path(root, sample), family="maxtext", memory_bytes=2**16)
    out["beside"] = _linked(Path(root, "model"), None, family=FAMILY, memory_bytes=4096)
    out["exists"] = _failure(Path(root, "model"), Path(root, "gemma2"))
    last = jax.process_index() == jax.process_count() - 1
    out["disagree"] = _failure(Path(root, "model"), Path(root, "to"), chunk_bytes=2**20 if last else 2**21)
    out["disagree_on_resume"] = _failure(Path(root, "model"), Path(root, "to"), resume=last)
    out["left"] = Path(root, "to.link").exists()
    out["full"] = _full(root)
    out["resumed"] = _linked(Path(root, "model"), Path(root, "to"), family=FAMILY, resume=True)
    return out


def beside_objects(url: str) -> dict[str, int]:
    """A link of a `gs://` directory."""
    return _linked(url, None, family=FAMILY, memory_bytes=4096)


def _linked(source: str | Path, destination: Path | None, **more: Any) -> dict[str, int]:
    told: list[tuple[int, int]] = []
    done = ost.link(source, destination, progress=lambda *now: told.append(now), **more)
    return {"made": done.made_bytes, "linked": done.linked_bytes, "own": told[-1][0] if told else 0}


def _failure(*args: Any, **more: Any) -> Any:
    return error_of(lambda: ost.link(*args, **more))


def _full(root: str) -> Any:
    """The first process cannot write the index; all leaves have been made by then."""

    def full(*_: Any) -> int:
        raise ost.StorageError("No space left on device")

    whole, link_job.write_references = link_job.write_references, full
    try:
        return _failure(Path(root, "model"), Path(root, "to"), family=FAMILY)
    finally:
        link_job.write_references = whole
