"""The rooms of the package and who may enter them."""

import ast
import sys
from pathlib import Path

import pytest

import orbax_safetensors

PACKAGE = Path(orbax_safetensors.__file__).parent
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def imports(module):
    """Absolute names of all that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(module):
    return {name.removeprefix("orbax_safetensors.") for name in imports(module) if name.startswith("orbax_safetensors")}


def others(module):
    roots = {name.split(".")[0] for name in imports(module)}
    return roots - set(sys.stdlib_module_names) - {"orbax_safetensors"}


@pytest.mark.parametrize("module", MODULES)
def test_rooms(module):
    room = module.split("/")[0] if "/" in module else module
    below = {
        "errors.py": (),
        "options.py": ("errors",),
        "format": ("errors", "format"),
        "plan": ("errors", "format", "plan"),
        "mapping": ("errors", "format", "plan", "mapping"),
        "io": ("errors", "io"),
        "checkpoint.py": ("errors", "format", "plan", "mapping.quantization", "io"),
        "arrays.py": ("errors", "plan"),
        "strided_copy.py": ("errors", "plan"),
        "decoding.py": ("errors", "format", "plan"),
        "transfer.py": ("errors", "plan", "io", "strided_copy", "decoding"),
        "orbax_store": ("errors", "plan", "trees", "processes", "io.local", "io.lock", "orbax_store"),
        "orbax_store/trust.py": ("errors", "format.header", "io.store"),
    }
    streaming = ("errors", "format", "plan", "io", "options", "processes", "transfer", "streaming")
    below |= {
        f"streaming/{own}": (*streaming, *more)
        for own, more in {
            "pipeline.py": (),
            "cutting.py": (),
            "draft.py": (),
            "layouts.py": (),
            "casts.py": (),
            "patterns.py": (),
            "partition.py": ("arrays",),
            "beside.py": ("mapped",),
            "safetensors_source.py": ("checkpoint",),
            "safetensors_sink.py": (),
            "to_safetensors.py": (),
            "orbax_tiles.py": ("orbax_store",),
            "to_orbax.py": ("orbax_store",),
        }.items()
    }
    room = module if module in below else room
    if room in below:
        for name in ours(module):
            assert name.startswith(below[room]), f"{module} imports {name}"
    if room == "cli":
        assert not [name for name in ours(module) if name.startswith("handlers")]
    if room == "handlers":
        assert not [name for name in ours(module) if name.startswith("cli")]
    if room not in ("cli", "handlers", "__init__.py"):
        assert not [name for name in ours(module) if name.startswith(("cli", "handlers"))]


@pytest.mark.parametrize(
    "module", [module for module in MODULES if module.startswith(("format/", "plan/", "mapping/", "io/"))]
)
def test_facts_and_geometry_know_no_jax(module):
    assert others(module) <= {"numpy", "ml_dtypes", "obstore", "boto3", "botocore"}


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("io/")])
def test_one_room_knows_obstore(module):
    assert "obstore" not in others(module)


@pytest.mark.parametrize(
    "module", ["checkpoint.py", "transfer.py", "strided_copy.py", "decoding.py", "errors.py", "options.py"]
)
def test_bytes_move_without_jax(module):
    assert others(module) <= {"numpy", "ml_dtypes"}


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("orbax_store/")])
def test_only_the_store_of_orbax_knows_tensorstore(module):
    assert "tensorstore" not in others(module)


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("orbax_store/")])
def test_one_room_knows_tensorstore(module):
    assert "tensorstore" not in others(module)


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("handlers/")])
def test_only_handlers_subclass_orbax(module):
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.ClassDef):
            assert not [base for base in node.bases if ast.unparse(base).startswith("ocp.")]


def test_every_public_name_is_there():
    for name in orbax_safetensors.__all__:
        assert getattr(orbax_safetensors, name) is not None
    assert orbax_safetensors.__all__ == sorted(orbax_safetensors.__all__)
