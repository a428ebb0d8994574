"""A function, its request and its plan take the same arguments, with the same defaults."""

import inspect
from dataclasses import MISSING, fields

RUN_ONLY = {"resume", "progress", "hard_links"}
PLACES = {"source", "destination"}


def assert_alike(call, request, plan_arguments):
    """`plan_arguments` is the typed dict of what a plan takes besides places and processes."""
    taken = {name: parameter.default for name, parameter in inspect.signature(call).parameters.items()}
    assert plan_arguments.__annotations__.keys() == taken.keys() - PLACES - RUN_ONLY
    requested = {field.name: field.default for field in fields(request)}
    assert taken.keys() - {"resume", "progress"} <= requested.keys()
    for name in plan_arguments.__annotations__.keys() - {"options"}:
        assert requested[name] == (MISSING if taken[name] is inspect.Parameter.empty else taken[name]), name
