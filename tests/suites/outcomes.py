"""A plugin of pytest: selects the tests that SUITE_WANTED lists, and writes each outcome to SUITE_OUTCOMES when it is known.

With SUITE_COLLECT it writes the names of all tests there.
"""

import json
import os

import pytest


def pytest_collection_modifyitems(session, config, items):
    if listed := os.environ.get("SUITE_WANTED"):
        with open(listed) as file:
            wanted = {name: at for at, name in enumerate(file.read().splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in wanted), key=lambda item: wanted[item.nodeid])


def pytest_collection_finish(session):
    if path := os.environ.get("SUITE_COLLECT"):
        with open(path, "w") as file:
            file.writelines(item.nodeid + "\n" for item in session.items if "\n" not in item.nodeid)


def write(line):
    if path := os.environ.get("SUITE_OUTCOMES"):
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid, location):
    write({"test": nodeid})


def said(report):
    """The line of a failure that says what went wrong."""
    if report.longrepr is None:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip()[:2000]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.suite_outcome = None
    yield
    outcome, message = item.suite_outcome or ("missing", "")
    write({"test": item.nodeid, "outcome": outcome, "message": message})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    expected = hasattr(report, "wasxfail")
    if report.failed:
        new = ("failed" if report.when == "call" else "error", said(report))
    elif report.skipped:
        new = ("xfailed" if expected else "skipped", "")
    elif report.when == "call":
        new = ("xpassed" if expected else "passed", "")
    else:
        return
    # A teardown's failure tells more than what came before.
    if item.suite_outcome is None or report.failed:
        item.suite_outcome = new
