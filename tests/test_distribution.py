"""What is installed is what a release has. Of an editable install, only the metadata is."""

import importlib.metadata
import shutil
from pathlib import Path

import pytest

import orbax_safetensors

PACKAGE = Path(orbax_safetensors.__file__).parent
TYPED = Path("orbax_safetensors/py.typed")


@pytest.fixture(scope="module")
def distribution():
    try:
        return importlib.metadata.distribution("orbax-safetensors")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")


def test_one_version(distribution):
    assert distribution.version == orbax_safetensors.__version__


def test_the_command_is_installed(distribution):
    (command,) = distribution.entry_points.select(group="console_scripts")
    assert command.name == "orbax-safetensors"
    assert command.load() is importlib.import_module("orbax_safetensors.cli.main").main
    assert shutil.which("orbax-safetensors")


def test_a_wheel_has_the_package_and_nothing_else(distribution):
    record = distribution.read_text("RECORD") or ""
    files = {Path(line.split(",")[0]) for line in record.splitlines() if not line.split(",")[0].endswith(".pyc")}
    if Path("orbax_safetensors/__init__.py") not in files:
        pytest.skip("the package is installed in place, from its sources")
    package = {file for file in files if file.parts[0] == "orbax_safetensors"}
    assert package == {path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")} | {TYPED}
    others = {file.parts[0] for file in files - package}
    assert others == {"..", f"orbax_safetensors-{distribution.version}.dist-info"}
    assert [file.name for file in files if file.parts[0] == ".."] == ["orbax-safetensors"]
