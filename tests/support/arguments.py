"""A function and its request take the same arguments, with the same defaults."""

import inspect
from dataclasses import MISSING, fields

RUN_ONLY = {"resume", "progress"}
PLACES = {"source", "destination"}


def assert_alike(call, request):
    taken = {name: parameter.default for name, parameter in inspect.signature(call).parameters.items()}
    requested = {field.name: field.default for field in fields(request)}
    assert taken.keys() - RUN_ONLY <= requested.keys()
    for name in taken.keys() - RUN_ONLY - PLACES - {"options"}:
        assert requested[name] == (MISSING if taken[name] is inspect.Parameter.empty else taken[name]), name
