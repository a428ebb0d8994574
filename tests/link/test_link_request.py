"""The request of a link is the place of its arguments and their defaults."""

import orbax_safetensors as ost
from orbax_safetensors.link.link_request import LinkArguments, LinkRequest
from tests.support.arguments import assert_alike


def test_the_function_and_its_plan_take_the_arguments_of_the_request():
    assert_alike(ost.link, LinkRequest, LinkArguments)
