"""What the doctor says of the disk; what needs a kernel to be tried is in tests/live."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed.cli.main import app
from testbed.fabric.live import doctor
from testbed.fabric.live.blockstore import DIRECT, FADVISE, NO_DEVICE


def doctored(monkeypatch: pytest.MonkeyPatch, method: str | OSError) -> None:
    """A host where nothing but the disk is looked at, and that is found to be so."""

    def found(directory: Path) -> str:
        assert directory.is_dir()
        if isinstance(method, OSError):
            raise method
        return method

    monkeypatch.setattr(doctor, "probe", found)
    monkeypatch.setattr(doctor, "_kernel", list)
    for check in ("_cores", "_memory", "_open_files"):
        monkeypatch.setattr(doctor, check, lambda: doctor.Check(name="another", ok=True, detail="fine"))


@pytest.mark.parametrize(
    ("method", "state", "said", "code"),
    [
        (DIRECT, "ok  ", "O_DIRECT works in", 0),
        (FADVISE, "warn", "pages are dropped around every read instead", 0),
        (NO_DEVICE, "warn", "lies in memory", 0),
        (OSError(13, "Permission denied"), "FAIL", "Permission denied", 2),
    ],
)
def test_a_disk_without_direct_io_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, method: str | OSError, state: str, said: str, code: int
) -> None:
    doctored(monkeypatch, method)
    done = CliRunner().invoke(app, ["doctor"])
    (line,) = [line for line in done.stdout.splitlines() if "O_DIRECT) for" in line]
    assert line.startswith(f"{state} direct I/O (O_DIRECT) for runs: ") and said in line
    assert done.exit_code == code and ("--out" in done.stdout) is (state != "ok  ")


def test_the_runs_directory_need_not_be_there_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doctored(monkeypatch, DIRECT)
    details = [check.detail for check in doctor.checks(tmp_path / "new" / "runs")]
    assert f"O_DIRECT works in {tmp_path}" in details
