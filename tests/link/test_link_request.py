"""The request of a link is the place of its arguments and their defaults."""

import inspect

import pytest

import orbax_safetensors as ost
from orbax_safetensors.link.link_request import LinkArguments, LinkRequest
from tests.support.arguments import PLACES, RUN_ONLY, assert_alike


def test_the_function_and_its_plan_take_the_arguments_of_the_request(tmp_path):
    assert_alike(ost.link, LinkRequest)
    taken = inspect.signature(ost.link).parameters
    assert LinkArguments.__annotations__.keys() == taken.keys() - PLACES - RUN_ONLY - {"hard_links"}
    with pytest.raises(TypeError, match="no_such"):
        ost.plan_link(tmp_path, tmp_path / "to", no_such=1)
