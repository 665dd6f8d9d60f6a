"""``testbed calibrate`` on made-up verdicts: which scales are probed, what is kept, what is refused, what is left."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import testbed.cli.calibrate as calibrate_module
from scenarios.loader import LoadedScenario, load_scenario
from testbed.cli import host_scale
from testbed.cli.calibrate import FACTORS, MOST_PROBES, first_valid, stretched
from testbed.cli.main import app
from testbed.cli.run import RunRequest

runner = CliRunner()
Probes = list[tuple[float, LoadedScenario]]


def command(*arguments: str) -> SimpleNamespace:
    done = runner.invoke(app, list(arguments))
    return SimpleNamespace(code=done.exit_code, out=done.stdout, err=done.stderr)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[float], int]], Probes]:
    """A host whose verdict on a run is a function of its bandwidth scale; gives the runs that were made on it."""

    def use(verdict: Callable[[float], int]) -> Probes:
        made: Probes = []

        def run_in_folder(folder: Path, loaded: LoadedScenario, request: RunRequest) -> int:
            bandwidth = float(loaded.plan.scale.bandwidth_scale)
            made.append((bandwidth, loaded))
            report = {"st0": {"lag_p99_ns": 30e6}, "pe0": {"lag_p99_ns": 12e6}}
            (folder / "roles.json").write_text(json.dumps({"basic": {"host_cpu_share": 0.81, "roles": report}}))
            return verdict(bandwidth)

        monkeypatch.setattr(calibrate_module, "run_in_folder", run_in_folder)
        return made

    return use


@pytest.mark.parametrize("lowest", range(len(FACTORS) + 1))
def test_bisection_finds_the_first_valid_scale_in_few_probes(lowest: int) -> None:
    probed: list[int] = []

    def is_valid(index: int) -> bool:
        probed.append(index)
        return index >= lowest

    found = first_valid(len(FACTORS), is_valid, lambda: True)
    assert found == (lowest if lowest < len(FACTORS) else None)
    assert len(probed) == len(set(probed)) <= MOST_PROBES
    assert FACTORS[probed[0]] == 1, "the scenario's own scale is tried first"


def test_a_search_cut_short_gives_the_best_that_it_saw() -> None:
    assert first_valid(17, lambda index: index >= 3, iter([True, True, False]).__next__) == 4
    assert first_valid(17, lambda index: False, iter([True, False]).__next__) is None


@pytest.mark.parametrize("name", ["quickstart", "two-pe-four-de", "two-pe-four-de-collectives"])
@pytest.mark.parametrize("factor", [FACTORS[0], 1.0, FACTORS[-1]])
def test_stretching_keeps_every_byte_and_every_ratio_of_times(name: str, factor: float, tmp_path: Path) -> None:
    small = ("workload.agents=2", "workload.max_turns=1")
    own = load_scenario(name, overrides=small, run_dir=tmp_path)
    slower = load_scenario(name, overrides=(*small, *stretched(own, factor).overrides), run_dir=tmp_path)
    assert slower.plan.params.layout == own.plan.params.layout
    assert slower.plan.params.dram_pages == own.plan.params.dram_pages
    assert slower.plan.cluster.snic_rate_bps == pytest.approx(own.plan.cluster.snic_rate_bps / factor, rel=1e-4)
    assert float(slower.plan.scale.time_scale) == pytest.approx(float(own.plan.scale.time_scale) * factor, rel=1e-4)


def test_what_is_found_is_kept_and_a_run_takes_it(
    host: Callable[[Callable[[float], int]], Probes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = host(lambda bandwidth: 0 if bandwidth > 15_000 else 3)
    out = tmp_path / "runs"
    done = command("calibrate", "quickstart", "--out", str(out), "--systems", "dualpath")
    assert done.code == 0, done.err
    assert len(runs) <= MOST_PROBES and runs[0][0] == 11_000
    assert {len(loaded.plan.scripts) for _, loaded in runs} == {54}, "agents make the load"
    assert {script.turns for _, loaded in runs for script in loaded.plan.scripts} <= {1, 2}
    assert "probe 1: scale.bandwidth=11000 scale.time=2.09" in done.out
    assert "INVALID; lag p99 30 ms (limit 50), CPU 81% (limit 95%)" in done.out
    assert list(out.iterdir()) == []
    (said,) = re.findall(r"--set scale.bandwidth=(\S+) --set scale.time=(\S+)\n", done.out)
    assert 15_000 * 2**0.25 <= float(said[0]) <= 15_000 * 2**0.5

    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("testbed.cli.run.run", lambda request: asked.append(tuple(request.overrides)) or 0)
    assert command("run", "quickstart", "--systems", "dualpath", "--calibrated").code == 0
    assert asked == [(f"scale.bandwidth={said[0]}", f"scale.time={said[1]}")]


def test_lanes_that_the_kernel_chose_are_no_other_load(
    host: Callable[[Callable[[float], int]], Probes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(lambda bandwidth: 0)
    auto = ("--set", "cluster.lanes=auto")
    monkeypatch.setattr("testbed.cli.run.settled", lambda lanes: "htb")
    assert command("calibrate", "quickstart", "--out", str(tmp_path / "runs"), *auto).code == 0
    monkeypatch.setattr("testbed.cli.run.run", lambda request: 0)
    done = command("run", "quickstart", "--calibrated", *auto)
    assert done.code == 0, done.err
    assert command("run", "quickstart", "--calibrated", "--set", "cluster.lanes=prio").code == 2


def test_without_a_valid_scale_nothing_is_kept(
    host: Callable[[Callable[[float], int]], Probes], tmp_path: Path, cache: Path
) -> None:
    host(lambda bandwidth: 3)
    done = command("calibrate", "quickstart", "--out", str(tmp_path / "runs"))
    assert done.code == 3 and "no scale that was tried is valid" in done.err and not cache.exists()
    host(lambda bandwidth: 1)
    done = command("calibrate", "quickstart", "--out", str(tmp_path / "runs"), "--probes", "1")
    assert done.code == 1 and "its run folder stays" in done.out and len(list(tmp_path.glob("runs/*/probe-1"))) == 1


@pytest.mark.parametrize("code", [2, 130, 143])
def test_an_interruption_or_a_bad_host_ends_it(
    host: Callable[[Callable[[float], int]], Probes], tmp_path: Path, cache: Path, code: int
) -> None:
    runs = host(lambda bandwidth: code)
    assert command("calibrate", "quickstart", "--out", str(tmp_path / "runs")).code == code
    assert len(runs) == 1 and not cache.exists()


def test_run_folders_of_probes_stay_if_asked(host: Callable[[Callable[[float], int]], Probes], tmp_path: Path) -> None:
    host(lambda bandwidth: 0)
    assert command("calibrate", "quickstart", "--out", str(tmp_path / "runs"), "--keep").code == 0
    assert len(list(tmp_path.glob("runs/*/probe-*/roles.json"))) == MOST_PROBES


def test_a_calibration_of_something_else_is_refused(
    host: Callable[[Callable[[float], int]], Probes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", "quickstart", "--calibrated", "--out", str(tmp_path / "runs"))
    done = command(*run)
    assert done.code == 2 and "was never calibrated on this host; run `testbed calibrate quickstart`" in done.err
    host(lambda bandwidth: 0)
    assert command("calibrate", "quickstart", "--out", str(tmp_path / "probes"), "--systems", "basic").code == 0
    for arguments, why in (
        ((*run, "--systems", "basic", "--set", "workload.agents=60"), "has been another since"),
        ((*run, "--systems", "basic", "--set", "scale.bandwidth=9000"), "has been another since"),
        (run, "without dualpath"),
    ):
        done = command(*arguments)
        assert done.code == 2 and why in done.err and done.err.count("\n") == 1
    cores = host_scale.host_and_cores()[1]
    monkeypatch.setattr(host_scale, "host_and_cores", lambda: ("elsewhere", cores + 6))
    done = command(*run, "--systems", "basic")
    assert done.code == 2 and f"and this is elsewhere with {cores + 6}" in done.err
    host_scale.path_of("quickstart").write_text("{")
    assert "cannot be read" in command(*run).err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["calibrate", "quickstrt"], "did you mean 'quickstart'?"),
        (["calibrate", "split-read"], "an experiment"),
        (["calibrate", "quickstart", "--turns", "0"], "--turns is 0, but it must be a positive number"),
        (["calibrate", "quickstart", "--minutes", "nan"], "--minutes is nan, but it must be a positive number"),
        (["calibrate", "quickstart", "--set", "scale.time=0.0001"], "below the 4 B minimum"),
        (["run", "split-read", "--calibrated"], "leave out --calibrated"),
    ],
)
def test_bad_input_is_a_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = command(*arguments, "--out", str(tmp_path / "runs"))
    assert done.code == 2 and sentence in done.err and done.err.count("\n") == 1 and not (tmp_path / "runs").exists()
