"""The partition of the rules of a command line, and a partition for users who wrote none.

No device is started for them, so that mistakes are answered before there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orbax_safetensors.cli.arguments import Rule, UsageError
from orbax_safetensors.devices.partition import Spec, partition
from orbax_safetensors.devices.sharding import Axes


def given_spec(rules: Sequence[Rule], mesh: Mapping[str, int] | None) -> dict[str, Spec] | None:
    """Return the rules of `--spec` as the functions take them.

    Raises `UsageError` or `RuleError` if they do not fit the mesh.
    """
    if rules and mesh is None:
        raise UsageError("--spec names the axes of a --mesh; also pass --mesh")
    spec: dict[str, Spec] = {}
    for rule in rules:
        if rule.regex in spec:
            raise UsageError(f"--spec {rule.text!r}: is passed twice")
        spec[rule.regex] = rule.spec
    partition(mesh, spec)
    return spec or None


def spread(shape: tuple[int, ...], mesh: Mapping[str, int]) -> Spec:
    """Return a partition that divides evenly, for users who have given none.

    Every mesh axis in turn shards the first dimension whose shards so far it divides, or none. Leading dimensions come
    first because their shards are contiguous in a file.
    """
    axes: list[tuple[str, ...]] = [() for _ in shape]
    left = list(shape)
    for axis, size in mesh.items():
        at = next((at for at, length in enumerate(left) if length and length % size == 0), None)
        if at is not None:
            axes[at] += (axis,)
            left[at] //= size
    return tuple(part or None for part in axes)


def axes_text(axes: Axes) -> str:
    """Return axes as `--spec` takes them."""
    return ",".join("+".join(entry) or "-" for entry in axes)


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Return a mesh as `--mesh` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())
