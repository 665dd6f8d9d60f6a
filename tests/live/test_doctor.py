"""The doctor tries everything and says what to do about what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import HostError
from testbed.fabric.live import doctor
from testbed.fabric.live.doctor import checks


@pytest.mark.live
def test_a_host_that_can_run_live_tests_is_healthy(tmp_path: Path) -> None:
    of_the_day = ("memory", "direct I/O (O_DIRECT) for runs")
    failed = [(check.name, check.detail) for check in checks(tmp_path) if not check.ok and check.name not in of_the_day]
    assert failed == []


@pytest.mark.live
def test_a_missing_kernel_feature_is_named_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_socket: object) -> None:
        raise HostError("the kernel refused to shape trial: Specified qdisc kind is unknown (ENOENT).")

    features = tuple((n, m, refuse if n == "htb with lanes" else attempt) for n, m, attempt in doctor._FEATURES)
    monkeypatch.setattr(doctor, "_FEATURES", features)
    failed = {check.name: check for check in checks() if not check.ok}
    assert set(failed) >= {"htb with lanes"}
    assert "modprobe sch_htb" in failed["htb with lanes"].remedy
    assert "unknown (ENOENT)" in failed["htb with lanes"].detail


def test_without_namespaces_nothing_else_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(_entry: object) -> int:
        raise HostError("user namespaces are forbidden: set `sysctl x=1`, or run the testbed with sudo.")

    monkeypatch.setattr(doctor, "run_in_sandbox", forbid)
    found = {check.name: check for check in checks()}
    assert not found["namespaces (user, mount, pid, network)"].ok
    assert "sysctl x=1" in found["namespaces (user, mount, pid, network)"].remedy
    assert not found["htb with lanes"].ok
    assert found["htb with lanes"].detail.startswith("not tried")
