"""The request of a conversion is the place of its arguments and their defaults."""

import pytest

import orbax_safetensors as ost
from orbax_safetensors.convert.convert_request import (
    ConvertArguments,
    ConvertRequest,
    ReshardArguments,
    ReshardRequest,
)
from tests.support.arguments import assert_alike


@pytest.mark.parametrize(
    ("call", "request_type", "plan_arguments"),
    [(ost.convert, ConvertRequest, ConvertArguments), (ost.reshard, ReshardRequest, ReshardArguments)],
)
def test_functions_and_plans_take_the_arguments_of_the_request(call, request_type, plan_arguments):
    assert_alike(call, request_type, plan_arguments)


@pytest.mark.parametrize("plan", [ost.plan_convert, ost.plan_reshard, ost.plan_link])
def test_a_plan_refuses_an_argument_that_is_not_known(plan, tmp_path):
    with pytest.raises(TypeError, match="no_such"):
        plan(tmp_path, tmp_path / "to", no_such=1)
