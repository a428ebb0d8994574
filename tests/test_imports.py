"""The rooms of the package, and the rule who may enter them: an arrow may skip floors, never climb."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import orbax_safetensors

TESTS = Path(__file__).parent
PACKAGE = Path(orbax_safetensors.__file__).parent
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
FLOORS = (
    {"errors"},
    {"format", "options", "storage"},
    {"geometry"},
    {"devices", "mapping", "transfer"},
    {"checkpoint", "orbax_store", "streaming"},
    {"convert", "delta", "link", "restore", "save"},
    {"handlers"},
    {"__init__", "cli"},
)
JOBS = FLOORS[5]
WITHOUT_JAX = ("delta", "errors", "format", "geometry", "mapping", "options", "storage", "transfer")
OF_STORES = {"boto3", "botocore", "fsspec", "huggingface_hub", "obstore"}
FROM_TESTS = re.compile(r"^\s*from tests\b[^(\n]*(?:\([^)]*\))?", re.MULTILINE)
MOST_LINES = 450
MOST_LINES_OF_TESTS = 600


@functools.cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree."""
    return tuple(ast.walk(ast.parse(MODULES[module].read_text())))


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Absolute names of all that a module imports, wherever in it."""
    names: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def room_of(name: str) -> str:
    return name.split(".")[0]


def rooms_entered(module: str) -> set[str]:
    """The rooms other than its own that a module imports from."""
    names = [
        name.removeprefix("orbax_safetensors.") for name in imports(module) if name.startswith("orbax_safetensors.")
    ]
    public = dir(orbax_safetensors)
    return {"__init__" if name in public else room_of(name) for name in names} - {room_of(module)}


def libraries(module: str) -> set[str]:
    """The packages that a module imports, other than this one and Python's own."""
    return {name.split(".")[0] for name in imports(module)} - set(sys.stdlib_module_names) - {"orbax_safetensors"}


def test_no_arrow_climbs():
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert {room_of(module) for module in MODULES} == set(floor)
    for module in MODULES:
        for room in rooms_entered(module):
            assert floor[room] <= floor[room_of(module)], f"{module} imports from {room}"


def test_jobs_do_not_know_each_other():
    for module in MODULES:
        if room_of(module) in JOBS:
            assert not rooms_entered(module) & JOBS, module


def test_rooms_have_an_order():
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        graph.setdefault(room_of(module), set()).update(rooms_entered(module))
    graph["cli"].discard("__init__")
    assert list(TopologicalSorter(graph).static_order())


def test_one_room_knows_each_library():
    for module in MODULES:
        found, room = libraries(module), room_of(module)
        assert room == "orbax_store" or "tensorstore" not in found, module
        assert room == "storage" or not found & OF_STORES, module
        assert room in ("format", "cli") or "safetensors" not in found, module
        other = {"humanize", "isal", "ml_dtypes", "numpy", "rich", "safetensors"}
        assert room not in WITHOUT_JAX or found <= OF_STORES | other, module


def test_the_command_line_takes_public_names_from_the_top():
    for module in MODULES:
        for node in nodes(module) if room_of(module) == "cli" else ():
            if isinstance(node, ast.ImportFrom) and re.match(r"orbax_safetensors\.(?!cli\b)", str(node.module)):
                assert not {alias.name for alias in node.names} & set(orbax_safetensors.__all__), module


def test_only_handlers_subclass_orbax():
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, ast.ClassDef) and room_of(module) != "handlers":
                assert not [base for base in node.bases if ast.unparse(base).startswith("ocp.")], module


def test_no_file_is_long():
    for module, path in MODULES.items():
        assert len(path.read_text().splitlines()) <= MOST_LINES, module


def test_every_public_name_is_there():
    for name in orbax_safetensors.__all__:
        assert getattr(orbax_safetensors, name) is not None
    assert orbax_safetensors.__all__ == sorted(orbax_safetensors.__all__)
    assert set(dir(orbax_safetensors)) == {*orbax_safetensors.__all__, "__version__"}


def test_type_checkers_see_the_names_that_are_imported_late():
    """In the module where they are, as `import orbax_safetensors` takes them from there."""
    seen = {}
    for node in nodes("__init__"):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("orbax_safetensors."):
            seen |= {alias.name: str(node.module) for alias in node.names}
    assert seen.keys() | {"mapping"} == set(orbax_safetensors.__all__)
    for name, module in seen.items():
        assert getattr(orbax_safetensors, name) is getattr(importlib.import_module(module), name)


@pytest.mark.process
def test_a_package_does_not_take_the_place_of_a_function():
    """Whichever is imported first."""
    code = """
import orbax_safetensors.convert, orbax_safetensors.delta, orbax_safetensors.link, orbax_safetensors.save
import orbax_safetensors as ost
for name in ("convert", "delta", "link", "save"):
    assert type(getattr(ost, name)).__name__ == "function", name
assert not hasattr(ost, "no_such_name")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.process
def test_threads_may_use_all_names_first_at_once():
    code = """
import sys, threading
sys.setswitchinterval(1e-5)
import orbax_safetensors as ost
begin = threading.Barrier(len(ost.__all__))
def use(name):
    begin.wait()
    found.add(getattr(ost, name))
found = set()
threads = [threading.Thread(target=use, args=(name,)) for name in ost.__all__]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == len(threads)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_call_of_the_restore_package_names_load():
    import orbax_safetensors.restore.run

    assert orbax_safetensors.restore.run.restore
    with pytest.raises(TypeError, match=r"orbax_safetensors\.restore is a package; .* orbax_safetensors\.load"):
        orbax_safetensors.restore("/models/qwen3")


def test_tests_share_only_what_is_in_support():
    for path in TESTS.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= MOST_LINES_OF_TESTS, path
        for imported in FROM_TESTS.findall(text):
            assert not re.search(r"\btest_", imported), f"{path}: {imported}"


def looks_at_a_clock(node: ast.AST) -> bool:
    """Whether a test sleeps or reads a clock here, itself or in the text of a program, or waits for some seconds."""
    match node:
        case ast.ImportFrom(module="time"):
            return True
        case ast.Constant(value=str(text)):
            return re.search(r"\btime\.sleep\(|\bsleep [\d.]+|\bTimer\(", text) is not None
        case ast.Call(func=function, args=args, keywords=keywords):
            name = ast.unparse(function)
            if name.startswith("time.") or name.endswith("Timer"):
                return True
            seconds = [keyword.value for keyword in keywords if keyword.arg == "timeout"]
            if re.search(r"\b(acquire|join|result|wait|wait_for)$", name):
                seconds += args
            return any(
                isinstance(each, ast.Constant) and isinstance(each.value, int | float) and each.value > 0
                for each in seconds
            )
    return False


def test_no_clock_decides_a_test():
    """A slow machine would fail it. `tests/support` waits for what has to come, and hangs otherwise."""
    for path in set(TESTS.rglob("*.py")) - set((TESTS / "support").rglob("*.py")) - {Path(__file__)}:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not looks_at_a_clock(node), f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_a_class_name_is_used_once():
    """Private or not: a reader who searches for a name finds one class."""
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(f"{module}:{node.lineno}")
    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_the_nouns_of_the_glossary_are_classes():
    nouns = re.findall(
        r"^\| \*\*(\w+)\*\* \| `(\w+)/` \|", (TESTS.parent / "docs/glossary.md").read_text(), re.MULTILINE
    )
    assert nouns
    for noun, room in nouns:
        homes = [
            module
            for module in MODULES
            if any(isinstance(node, ast.ClassDef) and node.name == noun for node in nodes(module))
        ]
        assert list(map(room_of, homes)) == [room], noun
