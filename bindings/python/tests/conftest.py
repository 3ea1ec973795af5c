"""The device that the tests run on: `VMACCEL_DEVICE`, else the processor."""

import os

import pytest
import vmaccel as va


@pytest.fixture(scope="session", autouse=True)
def device():
    return va.init(os.environ.get("VMACCEL_DEVICE", "cpu"))
