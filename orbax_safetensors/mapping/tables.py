"""`from_table`: a family of the table of a loader, as Tunix, Bonsai, jax-llm-examples and sglang-jax have it.

A table has a row for each kind of tensor: a regular expression for stored names, a template of the path in the tree,
and what to do with the tensor. Names and shapes are those of the checkpoint. Nothing is known here of any model.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from operator import methodcaller
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.names import some
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.family import Family, Shapes, Tree, checked_patterns, stored_shapes, tensor
from orbax_safetensors.mapping.weight_mappings import is_weight_mapping, mapped

Step = Callable[[View], View]
_NUMBERS = re.compile(r"(\d+)")


def from_table(
    table: Mapping[Any, Any], *, stack: Mapping[Any, Any] | None = None, unused: Sequence[str] = ()
) -> Family:
    """Return the family of a loader's table `{pattern: path}` or `{pattern: (path, transform)}`.

    ```python
    table = {r"model\\.embed_tokens\\.weight": ("embedding", ((1, 0), None))}
    family = ost.mapping.from_table(table, unused=[".*(layers|norm|lm_head).*"])
    embedding = ost.load("/models/llama", family=family)["embedding"]
    ```

    A row is for the stored names that `re.match` its pattern. Its path may refer to the groups of the pattern, as for
    `re.sub`; dots separate the keys, also written as `\\.`. A transform, or the value of an `Enum`, is one of these:

    - None: the tensor as it is stored;
    - `(permute, reshape)`, or the other way round, applied in that order: axes, sizes with at most one -1, or None;
    - `(permute, reshape, reshape_first)`;
    - a function from a `View` to a `View`, which may also call NumPy's `transpose`, `reshape`, `squeeze`, `stack` and
      `concatenate` and take slices.

    A list of `(path, transform)` makes several leaves of each tensor, such as an embedding and a tied head, or its
    slices, in any order. A save leaves out a leaf if others have all that it is made of: whole tensors come first.

    A row `{name: WeightMapping}` of sglang-jax is for the tensor of that name, in which each `*` is any text, or for
    the experts that it names. Its padding and sharding are not used: these are the target's.

    Args:
      stack: a table from paths to paths. The leaves whose paths become one path are stacked in front, by the number in
        which their paths differ, otherwise in the order of the table's rows; its transforms apply to the stack. Rows
        apply in turn, so that a stack can be of stacks. A row `(path, transform, "optional")` may be for no path.
      unused: regular expressions for whole names of stored tensors that the model does not read, whether or not a row
        is for them.

    Rows that are for no stored tensor are left out, and their transforms may be anything. The tree raises
    `MappingError` for a transform of another form, a tensor that several rows are for, several tensors with one path,
    stacks with a gap, and rows of `stack` that are for no path; a stored tensor without a row is an error as with all
    families. A save needs a checkpoint for the names and shapes of its tensors.

    Raises:
      MappingError: a row does not have a path.
    """
    rows = _rows("table", table)
    mappings = {name: row for name, row in table.items() if is_weight_mapping(row)}
    stacks = _rows("stack", stack or {})
    patterns = Tree({}, unused=unused).unused

    def tree(config: Mapping[str, Any]) -> Tree:
        skipped = [re.compile(pattern) for pattern in patterns]
        stored = {
            name: shape
            for name, shape in stored_shapes().items()
            if not any(pattern.fullmatch(name) for pattern in skipped)
        }
        leaves, shared = _from_rows(rows, stored)
        for path, view, name in mapped(mappings, stored):
            _add(leaves, path, _TableLeaf(view, len(rows) + len(leaves), name))
        for row in stacks:
            leaves = _stacked(row, leaves)
        return Tree({path: leaf.view for path, leaf in leaves.items()}, unused=patterns, shared=shared)

    return Family("table", (), tree)


@dataclass(frozen=True)
class _Row:
    """A row of a table.

    Attributes:
      number: the position of the row in the table.
      transform: what happens to the tensor, as the table has it.
    """

    number: int
    pattern: re.Pattern[str]
    template: str
    transform: Any
    is_optional: bool

    def path(self, name: str) -> str:
        """Return the path of a name that the row is for."""
        try:
            return self.pattern.sub(self.template, name).replace("\\.", ".")
        except (re.error, IndexError) as error:
            raise MappingError(f"{self.pattern.pattern!r}: {self.template!r} is not a template: {error}") from error

    def apply(self, view: View) -> View:
        """Return the view after all steps."""
        for step in _steps(repr(self.pattern.pattern), self.transform):
            try:
                view = step(view)
            except MappingError as error:
                raise MappingError(f"{self.pattern.pattern!r}: {error}") from error
            except Exception as error:
                raise MappingError(f"{self.pattern.pattern!r}: the transform of {view} failed: {error!r}") from error
            if not isinstance(view, View):
                raise MappingError(f"{self.pattern.pattern!r}: expected a transform to a View, found {view!r:.80}")
        return view


def _rows(what: str, table: Mapping[Any, Any]) -> list[_Row]:
    if not isinstance(table, Mapping):
        raise MappingError(f"{what}: expected a dict of paths by regular expression, found {table!r:.80}")
    rows: list[_Row] = []
    for pattern, value in table.items():
        if is_weight_mapping(value):
            continue
        (checked,) = checked_patterns(what, [pattern])
        compiled = re.compile(checked)
        several = what == "table" and isinstance(value, list) and all(isinstance(one, tuple) for one in value)
        rows += [_row(what, len(rows) + at, compiled, one) for at, one in enumerate(value if several else [value])]
    return rows


def _row(what: str, number: int, pattern: re.Pattern[str], value: Any) -> _Row:
    match (value,) if isinstance(value, str) else value:
        case [str(template)]:
            return _Row(number, pattern, template, None, False)
        case [str(template), transform]:
            return _Row(number, pattern, template, transform, False)
        case [str(template), transform, "optional"] if what == "stack":
            return _Row(number, pattern, template, transform, True)
    raise MappingError(f"{what}: {pattern.pattern!r}: expected a path, or a path and a transform, found {value!r:.80}")


def _steps(where: str, transform: Any) -> tuple[Step, ...]:
    """Return the operations of a transform, in the order in which they apply."""
    if isinstance(transform, Enum):
        transform = transform.value
    if callable(transform):
        return (transform,)
    match transform:
        case None:
            return ()
        case [permute, reshape, bool(reshape_first)]:
            return _steps(where, (reshape, permute) if reshape_first else (permute, reshape))
        case [_] | [_, _]:
            return tuple(_step(where, numbers) for numbers in transform if numbers is not None)
    raise MappingError(
        f"{where}: expected None, (permute, reshape), (permute, reshape, reshape_first) or a function as transform, "
        f"found {transform!r:.80}"
    )


def _step(where: str, numbers: Any) -> Step:
    """Return a permutation or a reshape. Axes have 0 or minus the rank among them; sizes are positive, or once -1."""
    try:
        values = tuple(map(operator.index, numbers))
    except TypeError:
        raise MappingError(f"{where}: expected axes or sizes, found {numbers!r:.80}") from None
    return methodcaller("transpose" if any(value == 0 or value < -1 for value in values) else "reshape", values)


@dataclass(frozen=True)
class _TableLeaf:
    """A leaf of the tree: `source` is a stored name or what a message says instead."""

    view: View
    row: int
    source: str


def _from_rows(rows: Sequence[_Row], stored: Shapes) -> tuple[dict[str, _TableLeaf], set[str]]:
    """Return the leaves that the rows make of the stored tensors, by path, and the tensors that make several."""
    leaves: dict[str, _TableLeaf] = {}
    shared: set[str] = set()
    for name, shape in stored.items():
        matches = [row for row in rows if row.pattern.match(name)]
        if len(patterns := list(dict.fromkeys(row.pattern.pattern for row in matches))) > 1:
            raise MappingError(f"several rows of the table are for {name!r}: {some(patterns, repr)}")
        if len(matches) > 1:
            shared.add(name)
        for row in matches:
            _add(leaves, row.path(name), _TableLeaf(row.apply(tensor(name, shape)), row.number, name))
    return leaves, shared


def _add(leaves: dict[str, _TableLeaf], path: str, leaf: _TableLeaf) -> None:
    if path in leaves:
        raise MappingError(
            f"{path!r} has two tensors, {leaves[path].source!r} and {leaf.source!r}; `stack` makes one leaf"
        )
    leaves[path] = leaf


def _stacked(row: _Row, leaves: Mapping[str, _TableLeaf]) -> dict[str, _TableLeaf]:
    """Return `leaves` with those that the row is for in stacks."""
    members: dict[str, list[str]] = {}
    for path in leaves:
        if row.pattern.match(path):
            members.setdefault(row.path(path), []).append(path)
    if not members and not row.is_optional:
        raise MappingError(f"stack: {row.pattern.pattern!r} is for none of the paths {some(list(leaves), repr)}")
    stacks = {path: _stack(path, paths, leaves) for path, paths in members.items()}
    joined = {path for paths in members.values() for path in paths}
    kept = {path: leaf for path, leaf in leaves.items() if path not in joined}
    if both := [path for path in stacks if path in kept]:
        raise MappingError(f"stack: {both[0]!r} is a leaf already, of {kept[both[0]].source!r}")
    return kept | {path: _TableLeaf(row.apply(leaf.view), leaf.row, leaf.source) for path, leaf in stacks.items()}


def _stack(path: str, members: Sequence[str], leaves: Mapping[str, _TableLeaf]) -> _TableLeaf:
    """Return the stack of the leaves at `members`, by the number in which these differ, or else by row of the table."""
    parts = {member: _NUMBERS.split(member) for member in members}  # texts, and numbers at odd positions
    first = parts[members[0]]
    columns = {at for split in parts.values() for at in range(len(first)) if split[at : at + 1] != first[at : at + 1]}
    column = columns.pop() if len(columns) == 1 and all(len(split) == len(first) for split in parts.values()) else 0
    numbers = {int(split[column]): member for member, split in parts.items()} if column % 2 else {}
    if len(numbers) == len(members):
        ordered = sorted(numbers)
        for low, high in pairwise(ordered):
            if high > low + 1:
                raise MappingError(f"stack: {path!r} lacks number {low + 1} between {members[0]!r} and {members[-1]!r}")
        order = [numbers[number] for number in ordered]
    else:
        rows = {leaves[member].row: member for member in members}
        if len(rows) < len(members):
            raise MappingError(
                f"stack: {path!r} is of paths that differ in more than one number: {some(members, repr)}"
            )
        order = [rows[number] for number in sorted(rows)]
    top = leaves[order[0]]
    return _TableLeaf(
        View.stack([leaves[member].view for member in order]), top.row, f"a stack of {top.source!r} and others"
    )
