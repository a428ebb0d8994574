"""The private names of Orbax and JAX that the package uses: each stands here, and in the source with its reason."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import orbax_safetensors

PACKAGE = Path(orbax_safetensors.__file__).parent
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

IMPORTS = {
    "devices/agreement.py": {"global_state"},
    "handlers/_compat.py": {"GLOBAL_TYPE_HANDLER_REGISTRY", "build_default_tree_metadata", "deserialize"},
    "orbax_store/_compat.py": {
        "InternalTreeMetadata",
        "PROCESS_SUBDIR_PREFIX",
        "Store",
        "build_array_write_spec",
        "build_kvstore_tspec",
        "get_sharding_tensorstore_spec",
        "run_sync",
        "serialize",
    },
}

# Attributes that handlers and `orbax_store` use and do not define. By eye, there are two of Orbax that they do define:
# `_array_metadata_store`, for which it looks in handlers of arrays, and `_handler` of `ocp.Checkpointer`.
ATTRIBUTES = {"orbax_store/directories.py": {"_backend"}}  # of `epath.Path`: the library that reaches a path


def private_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The private names of Orbax and JAX that a module imports, and the lines in which they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", alias) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, alias) for alias in node.names]
        else:
            continue
        for name, alias in names:
            if name.split(".")[0] in ("jax", "orbax") and any(part.startswith("_") for part in name.split(".")):
                yield name.rpartition(".")[2], alias.lineno


def reason(source: str, line: int) -> str:
    """The comment before a line; "" if there is none."""
    before = source.splitlines()[: line - 1]
    comments = []
    while before and before[-1].strip().startswith("#"):
        comments.insert(0, before.pop().strip(" #"))
    return " ".join(comments)


def attributes(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The private attributes that a module uses, and the names that it defines."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return {name for name in used if name.startswith("_") and not name.endswith("__")}, defined


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_every_private_import_is_known_and_has_its_reason():
    for module, path in MODULES.items():
        found = dict(private_imports(tree_of(path)))
        assert set(found) == IMPORTS.get(module, set()), module
        for name, line in found.items():
            assert re.match(r".+\. Waits for: .+\.", reason(path.read_text(), line)), f"{module}: {name}"


def test_private_attributes_are_known():
    of_modules = {module: attributes(tree_of(path)) for module, path in MODULES.items()}
    defined = set().union(*(names for _, names in of_modules.values()))
    for module, (used, _) in of_modules.items():
        if module.startswith(("handlers/", "orbax_store/")):
            assert used - defined == ATTRIBUTES.get(module, set()), module
