"""The table of families and classes of `transformers` in the docs: what each family makes of each class's models.

    python benchmarks/families_table.py [--write] [--only TYPE ...] [--directory DIR]

Takes every model type of which the package has a family, and every class of `transformers` of this type. A random model
of 12 layers, in float32, saves itself. Each family's tree of it is loaded over 8 simulated devices and saved with
`config=`, or `like=` if the tree follows from stored names. What `from_pretrained` makes of that is compared with the
model, names and bits. Prints a line for each class; `--write` makes `docs/families-table.md` of them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sweep_transformers
import tiny_models
import torch
import transformers
from checkpoints import add_directory

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, registry

PAGE = Path(__file__).parent.parent / "docs" / "families-table.md"
CONVENTIONS = ("maxtext", "tunix", "flax", "dequantized")
EQUAL, NO_FAMILY = "equal", "–"
# Whole cycles of all families that have cycles.
SIZES = ((32, 12), (16, 12), (8, 12), (4, 12))
# One rounding of a product or a quotient of float32, and of a sum with 1.
RELATIVE, ABSOLUTE = 2**-22, 2**-23
HEADER = """# Families and the classes of transformers

What each [family](families.md) makes of the models of `transformers` {version}. `benchmarks/families_table.py` makes
this page. It makes a random model of each class, with up to 12 layers in float32, and saves it with `save_pretrained`.
It loads the model as the family's tree over 8 devices, saves the tree with `config=`, and loads the result with
`from_pretrained`. `flax.paths` and `dequantized` take their trees from stored names, so they are saved with `like=`.

| cell | the model that comes back |
|---|---|
| equal | has the same names and bits |
| rounded: 39 of 111 | differs in 39 of 111 tensors by a rounding, because the family multiplies or adds |
| without `X` | has new values in `X`, for which the tree has no place; a save with `like=` copies `X` |
| refused: | does not exist: the load raises `MappingError` for this reason |
| – | does not exist: there is no such family for this class |

A model type in brackets, as `config.json` names it, tells models of one class apart.

"""
NOT_MADE = "\n`transformers` makes no small model of {classes}.\n"
COLUMNS = ("classes", "`maxtext`", "`tunix`", "`flax.paths`", "`dequantized`")


class Outcome(NamedTuple):
    """What becomes of a class's models: a cell for each convention, or none if no model can be made."""

    model_type: str
    class_name: str
    cells: tuple[str, ...]


def model_types() -> list[str]:
    """Return the model types that a family names a class of."""
    return [model_type for model_type in tiny_models.types() if any(map(_named, families_of(model_type)))]


def families_of(model_type: str) -> list[Family]:
    """Return the families that name a class of a model type, and those that are for any."""
    names = set(tiny_models.classes(model_type))
    return [family for family in registry.known() if not _named(family) or names & set(family.architectures)]


def _named(family: Family) -> bool:
    return bool(family.architectures)


def outcomes(model_type: str, parent: Path | None) -> Iterator[Outcome]:
    """Yield what becomes of each class of a model type."""
    for name in tiny_models.classes(model_type):
        with tempfile.TemporaryDirectory(dir=parent) as directory:
            yield Outcome(model_type, name, tuple(class_cells(model_type, name, Path(directory))))


def class_cells(model_type: str, name: str, directory: Path) -> Iterator[str]:
    """Yield what becomes of a class's model, for each convention."""
    try:
        model = tiny_models.make(model_type, directory / "first", [name], torch.float32, SIZES)
    except tiny_models.NotMade as error:
        print(f"{model_type}: {error}", file=sys.stderr)
        return
    config = json.loads((directory / "first" / "config.json").read_text())
    for convention in CONVENTIONS:
        candidates = [family for family in families_of(model_type) if family.name.partition(".")[0] == convention]
        family = next((family for family in candidates if family.applies_to(config)), None)
        yield through(family, model, directory / "first", directory / convention) if family else NO_FAMILY


def through(family: Family, model: Any, first: Path, second: Path) -> str:
    """Return what `from_pretrained` makes of a model that was loaded from `first` and saved as `second`."""
    try:
        tree = ost.load(first, sweep_transformers.mesh(), family=family.name)
    except ost.MappingError as error:
        return f"refused: {reason(error, family.name)}"
    given: dict[str, Any] = {"config": model.config} if _named(family) else {"like": first}
    ost.save(second, tree, family=family.name, **given)
    torch.manual_seed(1)
    found, info = type(model).from_pretrained(second, local_files_only=True, dtype="auto", output_loading_info=True)
    if info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError(f"{family.name}: {type(model).__name__}: from_pretrained: {info}")
    return difference(found.state_dict(), model.state_dict(), info["missing_keys"])


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], missing: Iterable[str]) -> str:
    """Return how two models differ; `missing` are the tensors that were not saved."""
    missing = set(missing)
    rounded = 0
    for name, tensor in expected.items():
        if name in missing or sweep_transformers.bits(found[name]) == sweep_transformers.bits(tensor):
            continue
        np.testing.assert_allclose(found[name], tensor, rtol=RELATIVE, atol=ABSOLUTE, err_msg=name)
        rounded += 1
    out = [f"rounded: {rounded} of {len(expected)}"] if rounded else []
    if missing:
        out.append(f"without {', '.join(f'`{name}`' for name in roots(missing, expected.keys() - missing))}")
    return "; ".join(out) or EQUAL


def roots(missing: set[str], others: Iterable[str]) -> list[str]:
    """Return the shortest prefixes of names that no other name begins with."""
    prefixes = {prefix for name in others for prefix in _prefixes(name)}
    return sorted({next(prefix for prefix in _prefixes(name) if prefix not in prefixes) for name in missing})


def _prefixes(name: str) -> list[str]:
    return [*(name[: at.start()] for at in re.finditer(r"\.", name)), name]


def reason(error: ost.MappingError, family: str) -> str:
    """Return why a load was refused, in a few words."""
    text = str(error).partition(f"{family}: ")[2]
    if found := re.search(r"made of '([^']+)' of shape \([^)]*\), which is not stored", text):
        return f"`{found[1]}` is not stored"
    if found := re.search(r"no leaf of the tree uses these stored tensors: (.+)", text):
        return f"no place for {found[1].replace(chr(39), '`')}"
    return text


def page(found: list[Outcome], version: str) -> str:
    """Return the page: a row for each set of cells, and below them the classes that cannot be made."""
    classes: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for model_type, name, cells in found:
        classes.setdefault(cells, {}).setdefault(name, []).append(f"`{model_type}`")
    ambiguous = {name for names in classes.values() for name in names if sum(name in of for of in classes.values()) > 1}
    lists = {
        cells: ", ".join(
            f"`{name}`" + (f" ({', '.join(types)})" if name in ambiguous else "")
            for name, types in sorted(names.items())
        )
        for cells, names in classes.items()
    }
    not_made = lists.pop((), None)
    rows = [line((lists[cells], *cells)) for cells in sorted(lists, key=lambda cells: (*map(rank, cells), cells))]
    text = "\n".join([HEADER.format(version=version) + line(COLUMNS), f"|{'---|' * len(COLUMNS)}", *rows, ""])
    return text + (NOT_MADE.format(classes=not_made) if not_made else "")


def rank(cell: str) -> int:
    """Return where a cell stands in its column: what comes back first, then what is refused or has no family."""
    return [EQUAL, "rounded", "without", "refused", NO_FAMILY].index(cell.split(":")[0].split(" ")[0])


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types, as config.json names them")
    add_directory(parser)
    args = parser.parse_args()
    sweep_transformers.quiet()
    found = []
    for model_type in args.only or model_types():
        for outcome in outcomes(model_type, args.directory):
            print(outcome.model_type, outcome.class_name, *outcome.cells, sep="\t", flush=True)
            found.append(outcome)
    if args.write:
        PAGE.write_text(page(found, transformers.__version__))


if __name__ == "__main__":
    main()
