"""The request of a conversion is the place of its arguments and their defaults."""

import pytest

import orbax_safetensors as ost
from orbax_safetensors.convert.convert_request import ConvertRequest, ReshardRequest
from tests.support.arguments import assert_alike


@pytest.mark.parametrize(("call", "request_type"), [(ost.convert, ConvertRequest), (ost.reshard, ReshardRequest)])
def test_functions_take_the_arguments_of_the_request(call, request_type):
    assert_alike(call, request_type)
