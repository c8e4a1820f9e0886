"""CPU seconds of the tests, by folder, file and test, with all processes that they start and reap.

    python -m pytest -p benchmarks.suite tests/e2e            # a table at the end
    SUITE_FILE=/tmp/cpu.json bash check.sh -p benchmarks.suite   # and each test's, as JSON

A process that a test's process did not reap (its launcher was killed) is not counted.
"""

import json
import os
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import PurePath

import pytest

_NUM_FILES, _NUM_TESTS = 25, 25
_KEY = "cpu_s"
_BEGAN = pytest.StashKey[float]()


def _cpu_s() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    item.stash[_BEGAN] = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((_KEY, _cpu_s() - item.stash[_BEGAN]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                tests[report.nodeid] = dict(report.user_properties)[_KEY]
    folders: defaultdict[str, float] = defaultdict(float)
    files: defaultdict[str, float] = defaultdict(float)
    for name, seconds in tests.items():
        path = name.partition("::")[0]
        folders[str(PurePath(path).parent)] += seconds
        files[path] += seconds
    terminalreporter.section("CPU seconds")
    for table, most in ((folders, len(folders)), (files, _NUM_FILES), (tests, _NUM_TESTS)):
        for name, seconds in sorted(table.items(), key=lambda row: -row[1])[:most]:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        terminalreporter.write_line(f"{sum(table.values()):8.1f}  all of {len(table)}")
    if path := os.environ.get("SUITE_FILE"):
        with open(path, "w") as file:
            json.dump(tests, file, indent=0)
