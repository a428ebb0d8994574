"""What a `quantization_config` says of quantised tensors that their names, dtypes and shapes do not say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.header import shown
from orbax_safetensors.geometry.encoding import Role

_METHODS = (
    "fp8",
    "fbgemm_fp8",
    "mxfp8",
    "mxfp4",
    "compressed-tensors",
    "modelopt",
    "quark",
    "awq",
    "gptq",
    "bitsandbytes",
    "auto-round",
    "mlx",
    "gemma",
)
# The bits of a code and the size of a group that MLX takes if a config does not say them, by the mode.
_MODES = {"affine": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
# The methods whose tensors AutoRound writes, by its `packing_format`.
_GPTQ_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
_PACKINGS = {
    "auto_round": _GPTQ_V2,
    "auto_round:gptqmodel": _GPTQ_V2,
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
}
_PLAIN_BITS = 16  # of modules that AutoRound leaves as they are
# Methods with versions that store codes in other ways: the key of the version, and those that are known.
_VERSIONS = {"awq": ("version", ("gemm",)), "gptq": ("checkpoint_format", ("gptq", "gptq_v2"))}
# Which weights of ModelOpt share a scale, by `quant_algo`; its configs do not say the size of blocks. Experts may have
# a scale each instead of one for each channel.
_SQUARE = (128, 128)
_ALGORITHMS = {"FP8": ("tensor",), "FP8_PER_CHANNEL_PER_TOKEN": ("channel", "tensor"), "FP8_PB_WO": ("block",)}


class Scheme(NamedTuple):
    """What a config says of some quantised tensors.

    Attributes:
      kind: of codes, "int" or "float".
      bits: of a code.
      strategy: which elements share a scale: "tensor", "channel", "group" or "block".
      group: elements of a row that share a scale, None if the config does not say it.
      block: rows and columns of a block.
      required: parameters that have to be stored although the format can do without them.
    """

    kind: str
    bits: int
    strategy: str
    group: int | None = None
    block: tuple[int, int] = (1, 1)
    required: frozenset[Role] = frozenset()


class Settings(NamedTuple):
    """What a config says.

    Attributes:
      method: None if there is no config.
      schemes: of quantised tensors; if there are none for some codes, these may be stored in any way.
      zero_added: to each field of a word of GPTQ's zero points.
      in_order: whether no groups are permuted; None if it does not say.
      own: the settings of a module by its name, None if it has those of all others.
    """

    method: str | None = None
    schemes: tuple[Scheme, ...] = ()
    zero_added: int = 1
    in_order: bool | None = None
    own: Callable[[str], Settings | None] = lambda module: None

    def of_module(self, module: str) -> Settings:
        """Return what is said of one module."""
        return self.own(module) or self

    def of(self, kind: str, bits: int) -> list[Scheme]:
        """Return the schemes of codes of a kind."""
        return [scheme for scheme in self.schemes if (scheme.kind, scheme.bits) == (kind, bits)]


def settings_of(config: Mapping[str, Any] | None) -> Settings:
    """Return what a `quantization_config` says; raise `MappingError` if its method is unknown, or it is not valid."""
    if config is None:
        return Settings()
    if not isinstance(config, Mapping):
        raise MappingError(f"quantization_config: expected an object, found {shown(config)}")
    method = config.get("quant_method")
    if method not in _METHODS:
        raise MappingError(f"quantization_config: expected quant_method {', '.join(_METHODS)}, found {shown(method)}")
    if method == "auto-round":
        packing = config.get("packing_format")
        if not isinstance(packing, str) or packing not in _PACKINGS:
            raise MappingError(
                f"quantization_config: expected packing_format {', '.join(_PACKINGS)}, found {shown(packing)}"
            )
        config = {**config, **_PACKINGS[packing]}
    settings = _settings(config["quant_method"], config)
    if method == "mlx":
        own = {name: settings._replace(schemes=each) for name, each in _mlx_modules(config).items()}
        return settings._replace(own=own.get)
    if method == "gemma":
        return settings._replace(own=_gemma_modules(settings, config))
    rules = tuple(_rules(settings, config))
    return settings._replace(own=lambda module: next((each for fits, each in rules if fits(module)), None))


def _settings(method: str, config: Mapping[str, Any]) -> Settings:
    """Return what a config says of all modules that it does not name."""
    version = _checked_version(method, config)
    permuted = _flag(config, "desc_act", None)
    schemes = tuple(_schemes(method, config))
    return Settings(method, schemes, version != "gptq_v2", None if permuted is None else not permuted)


def _rules(settings: Settings, config: Mapping[str, Any]) -> Iterator[tuple[Callable[[str], object], Settings]]:
    """Yield which modules GPTQModel's `dynamic` and AutoRound's `extra_config` mean, and what they say, in order."""
    if settings.method not in ("gptq", "awq"):
        return
    dynamic, extra = (_objects(config, key) for key in ("dynamic", "extra_config"))
    for pattern, changes in dynamic.items():
        is_plain, pattern = pattern.startswith("-:"), pattern.removeprefix("-:").removeprefix("+:")
        yield _compiled(pattern).match, _changed(settings, config, {"bits": _PLAIN_BITS} if is_plain else changes)
    changed = {name: _changed(settings, config, changes) for name, changes in extra.items()}
    yield from ((name.__eq__, each) for name, each in changed.items())
    yield from ((_compiled(name).search, each) for name, each in changed.items())


def _objects(config: Mapping[str, Any], key: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the objects under a key by their names."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping) or not all(isinstance(each, Mapping) for each in found.values()):
        raise MappingError(f"quantization_config: expected an object of objects as {key}, found {shown(found)}")
    return found


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise MappingError(f"quantization_config: {shown(pattern)} is not a regular expression: {error}") from error


def _changed(settings: Settings, config: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """Return settings with what is different in some modules. Those that are plain may have codes after all."""
    if changes.get("bits") == _PLAIN_BITS:
        return settings._replace(schemes=(), in_order=None)
    changes = {key: each for key, each in changes.items() if each is not None}
    return _settings(str(settings.method), {**config, **changes})


def _schemes(method: str, config: Mapping[str, Any]) -> Iterator[Scheme]:
    block = config.get("weight_block_size")
    if block is None and method == "mxfp8":
        block = (1, 32)
    if method == "compressed-tensors":
        yield from _compressed(config)
    elif method in ("awq", "gptq"):
        required = {Role.GROUP} if method == "gptq" and config.get("desc_act") else set()
        strategy = "channel" if config.get("group_size") == -1 else "group"
        yield _scheme("int", config.get("bits", 4), strategy, config.get("group_size"), required)
    elif method == "mlx":
        yield _mlx(config)
    elif method == "gemma":
        yield from _gemma(config)
    elif method == "bitsandbytes":
        yield Scheme("int", 8, "channel")
    elif block is not None:
        yield Scheme("float", 8, "block", block=_checked_block(block))
    elif method == "modelopt":
        algorithm = str(config.get("quant_algo")).upper()
        if "NVFP4" in algorithm and config.get("group_size") is not None:
            yield _scheme("float", 4, "group", config["group_size"], set())
        strategies = _ALGORITHMS.get(algorithm, ("block", "channel", "tensor", "group"))
        yield from (Scheme("float", 8, strategy, block=_SQUARE) for strategy in strategies)


def _compressed(config: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yield the schemes of compressed-tensors."""
    transforms = config.get("transform_config") or {}
    if not isinstance(transforms, Mapping) or transforms.get("config_groups"):
        raise MappingError("quantization_config: transform_config has rotations of weights, which are not undone")
    try:
        described = [group["weights"] for group in config["config_groups"].values() if group.get("weights")]
        kinds = [(each["type"], each["num_bits"], each.get("strategy"), each.get("group_size")) for each in described]
    except (AttributeError, KeyError, TypeError) as error:
        raise MappingError(f"quantization_config: is not valid for compressed-tensors: {error!r}") from error
    for weights, (kind, bits, strategy, size) in zip(described, kinds, strict=True):
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        required = set() if _flag(weights, "symmetric", True) else {Role.ZERO}
        if str(weights.get("actorder")).lower() in ("group", "dynamic", "true"):
            required.add(Role.GROUP)
        match strategy:
            case "block":
                block = _checked_block(weights.get("block_structure"))
                yield _scheme(kind, bits, strategy, None, set())._replace(block=block)
            case "group" | "tensor_group":
                yield _scheme(kind, bits, "group", size, required)
            case "channel" | "tensor":
                yield _scheme(kind, bits, strategy, size, required)
            case _:
                raise MappingError(
                    "quantization_config: expected strategy tensor, channel, group, tensor_group or block, "
                    f"found {shown(strategy)}"
                )


def _mlx(entry: Mapping[str, Any]) -> Scheme:
    """Return what MLX says of all modules, or of one."""
    mode = entry.get("mode") or "affine"
    if not isinstance(mode, str) or mode not in _MODES:
        raise MappingError(f"quantization_config: expected mode {', '.join(_MODES)}, found {shown(mode)}")
    bits, group = (
        usual if entry.get(key) is None else entry[key]
        for key, usual in zip(("bits", "group_size"), _MODES[mode], strict=True)
    )
    if mode != "affine" and (bits, group) != _MODES[mode]:
        raise MappingError(
            f"quantization_config: expected {_MODES[mode]} as bits and group_size of mode {mode}, "
            f"found {shown((bits, group))}"
        )
    return _scheme("int" if mode == "affine" else "float", bits, "group", group, set())


def _mlx_modules(config: Mapping[str, Any]) -> dict[str, tuple[Scheme, ...]]:
    """Return the schemes of the modules that have an entry of their own: none of those that stay plain."""
    entries = {name: entry for name, entry in config.items() if isinstance(entry, Mapping) or entry is False}
    return {name: () if entry is False else (_mlx(entry),) for name, entry in entries.items()}


def _gemma(entry: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Return what Gemma's configs say of all modules, or of some; a row of an embedding may have several scales."""
    bits = entry.get("num_bits", 4)
    if type(bits) is not int or bits not in (2, 4, 8):
        raise MappingError(f"quantization_config: expected num_bits 2, 4 or 8, found {shown(bits)}")
    return Scheme("int", bits, "channel"), Scheme("int", bits, "group")


def _gemma_modules(settings: Settings, config: Mapping[str, Any]) -> Callable[[str], Settings | None]:
    """Return the settings of the modules that a pattern finds: that which matches first in a name, then in the config.

    So does `transformers`, which makes one regular expression of all.
    """
    entries = [
        (_compiled(pattern), settings._replace(schemes=_gemma({**config, **entry})))
        for pattern, entry in _objects(config, "module_quant_configs").items()
    ]

    def own(module: str) -> Settings | None:
        starts = [(match.start(), at) for at, (each, _) in enumerate(entries) if (match := each.search(module))]
        return entries[min(starts)[1]][1] if starts else None

    return own


def _scheme(kind: str, bits: Any, strategy: str, group: Any, required: set[Role]) -> Scheme:
    """Return a scheme with numbers that are checked."""
    if type(bits) is not int or not (group is None or (type(group) is int and (group > 0 or group == -1))):
        raise MappingError(
            "quantization_config: expected integers as bits and group_size, which is positive or -1, "
            f"found {shown(bits)} and {shown(group)}"
        )
    return Scheme(kind, bits, strategy, group if strategy == "group" else None, required=frozenset(required))


def _flag(config: Mapping[str, Any], key: str, default: bool | None) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise MappingError(f"quantization_config: expected true or false as {key}, found {shown(value)}")
    return default if value is None else value


def _checked_version(method: str, config: Mapping[str, Any]) -> str | None:
    """Return the version of a format that a config names; raise `MappingError` if it stores codes in another way."""
    key, known = _VERSIONS.get(method, ("", ()))
    version = config.get(key)
    if version is not None and not (isinstance(version, str) and version.lower() in known):
        raise MappingError(f"quantization_config: expected {key} {' or '.join(known)}, found {shown(version)}")
    return None if version is None else version.lower()


def _checked_block(block: Any) -> tuple[int, int]:
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise MappingError(f"quantization_config: expected a block size of two positive integers, found {shown(block)}")
    return block[0], block[1]
