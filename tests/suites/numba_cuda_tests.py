"""A plugin of pytest for numba-cuda's tests: their names, and a fixture that the wheel does not have."""

import importlib

import pytest

PACKAGE = "numba.cuda.tests"


class Module(pytest.Module):
    """A test module that is imported by the name that the package redirects, which processes that tests start know too."""

    def _getobj(self):
        tests = importlib.import_module(PACKAGE).__path__[0]
        return importlib.import_module(".".join((PACKAGE, *self.path.with_suffix("").relative_to(tests).parts)))


def pytest_pycollect_makemodule(module_path, parent):
    return Module.from_parent(parent, path=module_path)


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request):
    # Whether FileCheck's inputs are kept when a test fails.
    request.cls._dump_failed_filechecks = False
