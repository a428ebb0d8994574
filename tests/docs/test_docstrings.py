"""The docstrings of public functions and classes have examples, which run as those of pages do."""

import inspect

import pytest
from orbax.checkpoint.experimental import v1

import orbax_safetensors as ost
from tests.support import examples
from tests.support.roots import ROOT

(IMPORTS,) = examples.python(ROOT / "docs" / "api" / "load-save.md")
PUBLIC = {name: getattr(ost, name) for name in ost.__all__ if name != "mapping"}
PUBLIC |= {f"mapping.{name}": getattr(ost.mapping, name) for name in ost.mapping.__all__}
ERRORS = [name for name, value in PUBLIC.items() if isinstance(value, type) and issubclass(value, Exception)]

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture
def example(tmp_path):
    """Returns a function that runs the one example of a public name."""
    examples.make_models(tmp_path)

    def run(name):
        (block,) = examples.python(inspect.cleandoc(PUBLIC[name].__doc__))
        examples.run(f"{IMPORTS}\n{block}", tmp_path, {})

    yield run
    ost.unregister()


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ERRORS])
def test_an_example_runs(example, name):
    if name == "SafetensorsCheckpointableHandler" and not hasattr(v1, "load"):
        pytest.skip("this version of Orbax has other names")
    example(name)


def test_docstrings_name_no_files_that_a_wheel_lacks():
    assert [name for name, value in PUBLIC.items() if ".md" in (value.__doc__ or "")] == []


@pytest.mark.parametrize("name", ERRORS)
def test_an_example_of_an_error_raises_and_prints_it(example, name, capsys):
    example(name)
    (message,) = capsys.readouterr().out.splitlines()
    assert message
