"""Conversions in processes of their own."""

import pytest

from tests.support.killed_conversions import Forks


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    found = Forks(tmp_path_factory.mktemp("errors"))
    yield found
    found.close()
