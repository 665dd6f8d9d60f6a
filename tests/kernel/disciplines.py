"""A pytest plugin: the summary names the kernel and every lane discipline with how many of its tests ended how.

A skipped test makes the run fail: this kernel has everything, so whatever a test missed is a fault of the guest's.
"""

from __future__ import annotations

import platform
from collections import Counter

import pytest

from testbed.fabric.spec import LaneDiscipline

_DISCIPLINE = "lane discipline"
_outcomes: dict[str, Counter[str]] = {}
_skipped: list[str] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note which disciplines a test is about: those among its parameters."""
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec else ():
        if isinstance(value, LaneDiscipline):
            item.user_properties.append((_DISCIPLINE, value.value))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test where it ended: in its call, or before."""
    if report.skipped:
        _skipped.append(report.nodeid)
    if report.when == "call" or report.outcome != "passed":
        for key, value in report.user_properties:
            if key == _DISCIPLINE:
                _outcomes.setdefault(str(value), Counter())[report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail for what was skipped."""
    if _skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a discipline."""
    terminalreporter.section(f"lane disciplines on kernel {platform.release()}")
    for name, outcomes in sorted(_outcomes.items()):
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{n} {how}" for how, n in sorted(outcomes.items())))
    if not _outcomes:
        terminalreporter.write_line("none tried")
    for name in _skipped:
        terminalreporter.write_line(f"skipped, which counts as failed here: {name}")
