"""``testbed paper`` as a command: files, exit codes, sentences; simulations are answered by a formula."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed.cli.main import app
from testbed.cli.paper import PaperRequest, paper
from testbed.errors import BugError, ConfigError, RunFailedError
from testbed.flowsim.run import FlowCase, FlowResult
from testbed.paper.figures import FIGURES
from testbed.paper.rows import COLUMNS, Row, number, write_csv
from tests.support.paper_world import fake_simulate

PNG = b"\x89PNG\r\n"


def run(out: Path, *figures: str, workers: int = 1, quick: bool = False) -> Path:
    assert paper(PaperRequest(figures=figures, workers=workers, quick=quick, out=out), fake_simulate) == 0
    (folder,) = out.iterdir()
    return folder


def _eventually(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold within 30 s."""
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path, "all")
    rows = read(folder / "paper.csv")
    assert tuple(rows[0]) == COLUMNS == ("figure", "cell", "system", "paper", "ours", "rel_error", "kind")
    assert [*dict.fromkeys(row["figure"] for row in rows)] == list(FIGURES)
    assert {row["kind"] for row in rows} == {"calibrated", "predicted"}
    for row in rows:
        paper_value, ours, error = (float(row[k]) if row[k] else None for k in ("paper", "ours", "rel_error"))
        if paper_value and ours is not None:
            assert error == pytest.approx(ours / paper_value - 1, abs=1e-5 * max(1.0, ours / paper_value))
        else:
            assert error is None
    for name in FIGURES:
        if name != "table3":  # a table without a series
            assert (folder / f"{name}.png").read_bytes().startswith(PNG)
    simulations = read(folder / "simulations.csv")
    assert len({row["simulation"] for row in simulations}) == len(simulations) > 150
    printed = capsys.readouterr().out
    assert "What was to be reproduced" in printed and "MISS" in printed and "pass" in printed
    assert all(f"{name}: " in printed for name in FIGURES) and "a tenth of the agents" not in printed
    assert "Compared with the paper" in printed and str(folder) in printed.replace("\n", "")
    assert not (folder / "failure.txt").exists()


def test_some_figures_and_fewer_agents_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path, "fig14", "table1", quick=True)
    assert {row["figure"] for row in read(folder / "paper.csv")} == {"fig14", "table1"}
    printed = capsys.readouterr().out
    assert printed.count("a tenth of the agents: does not compare with the paper") == 1  # table1 is no simulation
    assert "What was to be reproduced" not in printed and "Compared with the paper" not in printed
    resolved = json.loads((folder / "config.resolved.json").read_text(encoding="utf-8"))
    assert resolved == {"seed": 0, "figures": ["table1", "fig14"], "quick": True, "aps_step": 0.05}
    assert [row["requests"] for row in read(folder / "simulations.csv")] == ["3", "3"]


def test_workers_do_not_change_the_file(tmp_path: Path) -> None:
    one = run(tmp_path / "one", "fig9", "fig12", workers=1)
    two = run(tmp_path / "two", "fig9", "fig12", workers=2)
    assert (one / "paper.csv").read_bytes() == (two / "paper.csv").read_bytes()


def stands_still(case: FlowCase) -> FlowResult:
    if case.system == "dualpath":
        raise BugError("it stands still")
    return fake_simulate(case)


def test_a_simulation_that_fails_is_code_1_after_all_else_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = PaperRequest(figures=("fig14",), workers=1, out=tmp_path)
    with pytest.raises(RunFailedError, match=r"1 simulations did.*660B 64K DualPath 2P4D 1,024 agents \(it stands"):
        paper(request, stands_still)
    (folder,) = tmp_path.iterdir()
    (row, *_) = [r for r in read(folder / "paper.csv") if r["paper"]]
    assert row["system"] == "DualPath" and row["ours"] == "" and row["rel_error"] == ""
    assert "it stands still" in (folder / "failure.txt").read_text(encoding="utf-8")
    assert "fig14" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fig17"], "unknown figure 'fig17' (did you mean 'fig7'?)"),
        (["fig7", "tabel1"], "unknown figure 'tabel1' (did you mean 'table1'?); choose from table1, fig7,"),
        (["--workers", "-1"], "--workers is -1"),
        (["--aps-step", "0"], "--aps-step is 0; choose between 0.001 and 0.25"),
        (["--aps-step", "nan"], "--aps-step is nan"),
    ],
)
def test_bad_input_is_a_sentence_and_code_2(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["paper", *arguments, "--out", str(tmp_path / "runs")])
    assert done.exit_code == 2 and sentence in done.stderr and done.stdout == ""
    assert done.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()


SLOW = """
import os, pathlib, sys, time
from testbed.cli.paper import PaperRequest, paper

def slow(case):
    pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
    time.sleep(60)

paper(PaperRequest(figures=("fig14",), workers=2, out=pathlib.Path(sys.argv[1], "runs")), slow)
"""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_command(ending: signal.Signals, tmp_path: Path) -> None:
    command = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path)], stderr=subprocess.DEVNULL)
    assert _eventually(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert all(map(_runs, workers))
    command.send_signal(ending)
    assert command.wait(timeout=10) == -ending
    assert _eventually(lambda: not any(map(_runs, workers)))


def test_a_place_that_cannot_hold_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="no run folder can be made there"):
        paper(PaperRequest(figures=("table1",), out=tmp_path / "file"), fake_simulate)


def test_rows_as_text(tmp_path: Path) -> None:
    row = Row(figure="fig7", where="a, b", quantity="JCT, s", system="Basic", paper=0.0, ours=1 / 3)
    assert row.rel_error is None and number(None) == "" and number(1 / 3) == "0.333333"
    write_csv(tmp_path / "paper.csv", [row])
    assert (tmp_path / "paper.csv").read_bytes() == (
        b'figure,cell,system,paper,ours,rel_error,kind\nfig7,"a, b: JCT, s",Basic,0,0.333333,,predicted\n'
    )
