"""What a directory is that holds no safetensors files, and where the files may be that its user means, for messages."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from itertools import islice

from orbax_safetensors.format.foreign import ORBAX_TREE, of_names
from orbax_safetensors.format.index import SUFFIX

_NUMBERED = re.compile(r"(?:.*[-_])?([0-9]{1,18})")  # a step: `12`, `checkpoint-500`
# How far below a directory files are searched, in how many directories, of how many entries.
_DEPTH, _DIRECTORIES, _ENTRIES = 3, 200, 1000
_SHOWN = 3
# How the names of Orbax's directories end until they are complete; a number may follow.
_UNFINISHED = ".orbax-checkpoint-tmp"
# What a conversion into safetensors files has added to the name of its directory until then.
_PARTIAL = ".partial"
# In an unfinished checkpoint of this package: what it is to be. It exists from the beginning to the end of the work.
CONVERSION_RECORD = "_in_progress.json"
# What to do about what a conversion has begun.
RESUME = "run the same convert or reshard with --resume"


def directory_hint(path: str, names: Iterable[str]) -> str:
    """Return what a message adds on a directory with these `names` and no safetensors; empty if nothing is known.

    That is what the directory holds instead and what to do with it, or if it is on this machine, which one to pass.
    """
    names = sorted(names)
    if advice := _in_hub_cache(path, names):
        return f"; {advice}"
    found = _FoundCheckpoints()
    _search(path, names, _DEPTH, found)
    if found.files:
        one = "pass" if len(found.files) == 1 else "pass one of these:"
        return f"; {one} {', '.join(found.files[:_SHOWN])}{', ...' if len(found.files) > _SHOWN else ''}"
    if found.orbax:
        where = "it" if found.orbax[0] == path else found.orbax[0]
        return (
            f"; {where} is a checkpoint of Orbax, which Orbax restores, and of which "
            f"`orbax-safetensors convert {path} NEW --to safetensors` makes files"
        )
    kind = of_names(names)
    return f"; it {kind}" if kind else ""


def similar(path: str) -> str:
    """Return what a message adds on a path that does not exist: the nearest name beside it, or that it is a pattern."""
    if "*" in path or "?" in path:
        return "; paths are no patterns: pass the directory"
    if path.startswith("$"):
        return "; variables are not expanded: pass os.path.expandvars(path)"
    directory, name = os.path.split(path.rstrip("/"))
    nearest = difflib.get_close_matches(name, _names(directory or "."), n=1)
    return f" (nearest: {os.path.join(directory, nearest[0])})" if nearest else ""


def unfinished(path: str) -> str:
    """Return what a message adds on a path that does not exist yet: a save or a conversion has begun it; or nothing."""
    directory, name = os.path.split(path.rstrip("/"))
    for begun in _names(directory or "."):
        if begun == f"{name}{_PARTIAL}" or begun.startswith(f"{name}{_UNFINISHED}"):
            break
    else:
        return ""
    at = os.path.join(directory, begun)
    if begun.endswith(_PARTIAL) or os.path.exists(os.path.join(at, CONVERSION_RECORD)):
        return f"; {at} is not finished: {RESUME}"
    return f"; {at} exists: its save has not finished; wait for it (wait_until_finished())"


class _FoundCheckpoints:
    """Directories with safetensors files, and items of Orbax; of steps, the latest alone."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.orbax: list[str] = []
        self.left = _DIRECTORIES


def _search(path: str, names: list[str], depth: int, found: _FoundCheckpoints) -> None:
    """Add what is in a directory with these names, or below it."""
    if any(name.endswith(SUFFIX) for name in names):
        found.files.append(path)
        return
    if ORBAX_TREE in names:
        found.orbax.append(path)
        return
    for name in sorted(names, key=_by_step) if depth else ():
        below = os.path.join(path, name)
        if name.startswith(".") or found.left == 0 or not os.path.isdir(below):
            continue
        found.left -= 1
        before = len(found.files) + len(found.orbax)
        _search(below, _names(below), depth - 1, found)
        if len(found.files) + len(found.orbax) > before and _NUMBERED.fullmatch(name):
            return


def _by_step(name: str) -> tuple[int, str]:
    number = _NUMBERED.fullmatch(name)
    return (-int(number[1]) if number else 1), name


def _in_hub_cache(path: str, names: list[str]) -> str | None:
    """Return which directory to pass if this is one of the Hub's cache around its snapshots."""
    if any(name.startswith("models--") for name in names):
        return f"this is the Hub's cache: pass hf://owner/name, or {path}/models--owner--name/snapshots/HASH"
    repository = path
    if os.path.basename(path) in ("snapshots", "blobs", "refs"):
        repository, names = os.path.dirname(path), _names(os.path.dirname(path))
    if not {"snapshots", "blobs"} <= set(names):
        return None
    snapshots = os.path.join(repository, "snapshots")
    commits = _names(snapshots)
    try:
        with open(os.path.join(repository, "refs", "main")) as file:
            main = file.read(100).strip()
    except (OSError, ValueError):
        main = ""
    commit = main if main in commits else commits[0] if commits else "HASH"
    return f"this is the Hub's cache of a repository: pass {os.path.join(snapshots, commit)}"


def _names(path: str) -> list[str]:
    """Return some of the names in a directory, sorted; none if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in islice(entries, _ENTRIES))
    except (OSError, ValueError):
        return []
