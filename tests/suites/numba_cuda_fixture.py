"""The fixture that numba-cuda's tests need and its wheel does not have."""

import pytest


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request):
    # Whether FileCheck's inputs are kept when a test fails.
    request.cls._dump_failed_filechecks = False
