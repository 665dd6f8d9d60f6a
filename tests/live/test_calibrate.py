"""``testbed calibrate`` on this host: one probe of a tiny cluster, with real bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed.cli.main import app
from tests.live.small import BUSY_HOST, ONE_GPU

pytestmark = pytest.mark.live


def test_a_probe_is_a_run_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = (*ONE_GPU, *BUSY_HOST, "workload.agents=1")
    arguments = ["calibrate", "--systems", "dualpath", "--turns", "1", "--probes", "1", "--out", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, [*arguments, *(word for override in small for word in ("--set", override))])
    assert done.exit_code == 0, done.output
    assert "probe 1: scale.bandwidth=11000" in done.stdout and ": valid; lag p99 " in done.stdout
    assert list((tmp_path / "runs").iterdir()) == []
    assert (tmp_path / "cache/dualpath-testbed/calibration/quickstart.json").exists()
