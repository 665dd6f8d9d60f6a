"""``testbed parity``: what it compares, what it calls parity, what it refuses."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scenarios.loader import scenario_names
from testbed.cli import run as run_module
from testbed.cli.parity import LISTED, TOLERANCE, compared
from tests.unit.test_cli import only_folder
from tests.unit.test_cli import testbed as cli

SETTINGS = ("--set", "workload.agents=4", "--set", "workload.max_turns=2", "--set", "cluster.gpus_per_node=2")


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A run folder as a live run leaves it: the sim world's, under the other name."""
    out = tmp_path / "past"
    assert cli("run", "quickstart", "--world", "sim", *SETTINGS, "--out", str(out), "--quiet").code == 0
    folder = only_folder(out)
    edit(folder, world="live")
    return folder


def edit(folder: Path, **values: Any) -> None:
    path = folder / "metrics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def document(jct_s: float, **values: Any) -> dict[str, Any]:
    times = {"mean": 1.0}
    system = {
        "jct_s": jct_s, "ttft_s": times, "ttst_s": times, "tpot_s": times, "bytes_by_path": {"pe": 8, "de": 0},
        "snic_utilisation": {"pe0": {"run": 0.5, "plateau": 1.0}},
    }  # fmt: skip
    return {"systems": {"basic": system}, "failures": [], "invalid_reasons": [], **values}


def test_the_median_of_the_predictions_counts_and_its_range_is_kept() -> None:
    result = compared("x", [document(10.0)], [document(t) for t in (9.0, 10.4, 13.0)])
    jct = next(f for f in result.figures if f.name == "jct_s")
    assert jct.error == pytest.approx(0.04) and (min(jct.sim), max(jct.sim)) == (9.0, 13.0)
    assert result.exit_code == 0 and not result.beyond
    nothing = next(f for f in result.figures if f.name == "bytes_by_path.de")
    assert nothing.error is None


@pytest.mark.parametrize(
    ("live", "code"),
    [
        (document(10.0 * (1 + TOLERANCE)), 0),
        (document(10.7), 1),
        (document(10.7, invalid_reasons=["basic: the host was the bottleneck."]), 3),
        (document(10.0, failures=["basic: 1 rounds ended with an error"]), 1),
    ],
)
def test_what_is_parity(live: dict[str, Any], code: int) -> None:
    assert compared("x", [live], [document(10.0)]).exit_code == code


def test_a_prediction_that_cannot_be_trusted_is_none() -> None:
    assert (
        compared("x", [document(10.0)], [document(10.0, invalid_reasons=["basic: the ledger is off."])]).exit_code == 3
    )


def test_a_sim_run_that_fails_predicts_nothing(live: Path, tmp_path: Path) -> None:
    arguments = ("--set", "protocol.wait_deadline_s=0.01", "--out", str(tmp_path / "p"))
    resolved = json.loads((live / "config.resolved.json").read_text())
    resolved["protocol"]["wait_deadline_s"] = 0.01
    (live / "config.resolved.json").write_text(json.dumps(resolved))
    done = cli("parity", "quickstart", *SETTINGS, *arguments, "--live-run", str(live))
    assert done.code == 1 and "the sim run failed" in done.err and "Traceback" not in done.err


def test_compares_with_a_run_that_is_there(live: Path, tmp_path: Path) -> None:
    done = cli("parity", "quickstart", *SETTINGS, "--draws", "2", "--live-run", str(live), "--out", str(tmp_path / "p"))
    assert done.code == 0, done.err
    assert "quickstart, basic" in done.out and "quickstart: parity" in done.out
    folder = only_folder(tmp_path / "p")
    assert {path.name for path in folder.iterdir()} == {"sim", "parity.csv"}
    assert json.loads((folder / "sim" / "metrics.json").read_text())["world"] == "sim"
    rows = list(csv.DictReader((folder / "parity.csv").open()))
    assert {row["figure"] for row in rows} >= {"jct_s", "ttft_s.mean", "tpot_s.mean", "bytes_by_path.de"}
    jct = next(row for row in rows if (row["system"], row["figure"]) == ("basic", "jct_s"))
    assert float(jct["sim_min"]) <= float(jct["sim"]) <= float(jct["sim_max"]) and jct["draws"] == "2"


def test_a_live_run_is_made_where_none_is_given(live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(entry: object) -> int:
        (folder,) = (tmp_path / "p").iterdir()
        shutil.copy(live / "metrics.json", folder / "live-1" / "metrics.json")
        return 0

    monkeypatch.setattr(run_module, "run_in_sandbox", measured)
    done = cli("parity", "quickstart", *SETTINGS, "--draws", "1", "--out", str(tmp_path / "p"))
    assert done.code == 0 and "quickstart: parity" in done.out
    assert {path.name for path in only_folder(tmp_path / "p").iterdir()} == {"sim", "live-1", "parity.csv"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--live-run", "nowhere"), "nowhere/metrics.json: is not the metrics of a run (No such file"),
        (("--runs", "0"), "--runs is 0 and --draws is 5, but both must be at least 1"),
        (("--set", "topology=48p96d"), "run it with --world sim"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = cli("parity", "quickstart", *arguments, "--out", str(tmp_path / "p"))
    assert done.code == 2 and sentence in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "p").exists()


def test_only_a_live_run_of_the_same_configuration_is_compared(live: Path, tmp_path: Path) -> None:
    arguments = ("parity", "quickstart", "--live-run", str(live), "--out", str(tmp_path / "p"))
    done = cli(*arguments)
    assert done.code == 2 and "its workload is not that of quickstart here" in done.err
    done = cli(*arguments, *SETTINGS, "--seed", "3")
    assert done.code == 2 and "its seed is not that of quickstart here" in done.err
    edit(live, world="sim")
    done = cli(*arguments, *SETTINGS)
    assert done.code == 2 and "is a run in the sim world; --live-run takes a live one" in done.err


def test_scenarios_of_every_kind_are_listed() -> None:
    assert len(LISTED) >= 6 and {"cnic-bound", "compute-bound"} <= set(LISTED) <= set(scenario_names())
