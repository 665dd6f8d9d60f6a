"""Experiments: what a file may say, how claims over variants are judged, and what the command leaves."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scenarios.loader import LoadedScenario, is_experiment, read_scenario
from testbed.cli import experiment as command
from testbed.cli.experiment import ExperimentRequest, _again, _jobs
from testbed.cli.run import RunRequest, run_in_folder
from testbed.errors import ConfigError, HostError
from testbed.experiment.file import Experiment, read_experiment
from testbed.experiment.judge import Outcome, RunEnd, Unsupported, judge
from testbed.fabric.live.lane_offers import MODULES
from testbed.fabric.spec import LaneDiscipline
from testbed.metrics.expression import figure, names_in, with_first, with_numbers
from testbed.report import run_folder
from testbed.runtime.plan import World
from testbed.sweep.jobs import locked
from tests.unit.test_cli import testbed as cli

FILE = """
title = "T"
question = "Does it?"
scenario = "quickstart"
systems = ["basic", "dualpath"]
[set]
"workload.agents" = 4
[[variant]]
name = "as-is"
x = 1
[[variant]]
name = "fast"
x = 2
set = { gpu.speedup = 100 }
worlds = ["sim"]
[[expect]]
name = "gain"
claim = "each.dualpath.jct_s < each.basic.jct_s"
text = "it does"
[[expect]]
name = "faster"
claim = "fast.basic.jct_s <= 0.9 * as_is.basic.jct_s"
text = "in sim"
[[figure]]
label = "DualPath"
value = "dualpath.jct_s"
panel = "JCT"
[agree]
ratios = ["ratio(each.basic.jct_s, each.dualpath.jct_s)"]
"""


def read(directory: Path, text: str = FILE) -> Experiment:
    path = directory / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return read_experiment(str(path))


def test_expressions_know_what_they_name() -> None:
    text = "min(a.b.c_s, 2) <= 1.05 * a.b.c_s and not c.d.e > 1"
    assert names_in(text) == ["a.b.c_s", "c.d.e"]
    assert with_first("each.b.c + min(x.each.d, 1)", "each", "v") == "v.b.c + min(x.each.d, 1)"
    assert (
        with_numbers("ratio(a.b, c.d) > 2 * c.d", {"a.b": 1.23456, "c.d": 20000.0}) == "ratio(1.235, 2e+04) > 2 * 2e+04"
    )
    assert figure("a.b / 2 - 1", {"a.b": 5.0}) == 1.5
    with pytest.raises(ConfigError, match="is a comparison"):
        figure("a.b > 2", {"a.b": 5.0})


def test_a_file_is_expanded_and_checked(tmp_path: Path) -> None:
    experiment = read(tmp_path)
    as_is, fast = experiment.variants
    assert as_is.settings == (("workload.agents", "4"),) and as_is.worlds == ("live", "sim")
    assert fast.settings == (("workload.agents", "4"), ("gpu.speedup", "100"))
    assert [(c.name, c.claim, c.worlds) for c in experiment.claims] == [
        ("gain (as-is)", "as_is.dualpath.jct_s < as_is.basic.jct_s", ("live", "sim")),
        ("gain (fast)", "fast.dualpath.jct_s < fast.basic.jct_s", ("sim",)),
        ("faster", "fast.basic.jct_s <= 0.9 * as_is.basic.jct_s", ("sim",)),
    ]
    assert [(c.value, c.tolerance) for c in experiment.comparisons] == [
        ("as_is.basic.working_set.life_s", 0.05),
        ("as_is.dualpath.working_set.life_s", 0.05),
        ("ratio(as_is.basic.jct_s, as_is.dualpath.jct_s)", 0.1),
    ]
    assert is_experiment(str(tmp_path / "mine.toml")) and not is_experiment("quickstart")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("question", "qestion", "unknown key 'qestion' (did you mean 'question'?)"),
        ("gpu.speedup", "gpu.speedip", "variant fast: unknown key 'gpu.speedip' (did you mean 'gpu.speedup'?)"),
        ("gpu.speedup = 100", 'systems = "basic"', "use its key systems"),
        ('name = "fast"', 'name = "as_is"', "a name of its own"),
        ('name = "fast"', 'name = "each"', "a name of its own"),
        ('name = "fast"', 'name = "as-is-2"', "a repeat of the variant as-is has the folder of as-is-2"),
        ("<= 0.9 * as_is", "<= 0.9 * as_si", "'as_si.basic.jct_s' is of no variant (did you mean 'as_is'?)"),
        ("<= 0.9 * as_is.basic", "<= 0.9 * as_is.oracle", "runs basic, dualpath, not 'oracle'"),
        ("0.9 * as_is.basic.jct_s", "0.9 * as_is.basic.jtc_s", "unknown metric 'jtc_s' (did you mean 'jct_s'?)"),
        ("fast.basic.jct_s <= 0.9", "fast.basic.jct_s + 0.9", "compares nothing"),
        ('value = "dualpath.jct_s"', 'value = "oracle.jct_s"', "no variant runs oracle"),
        ('value = "dualpath.jct_s"', 'value = "dualpath.jct_s > 2"', "is a comparison"),
        ('text = "in sim"', 'text = "in sim"\nworlds = ["live"]', "do not all run in live"),
        ("x = 2\n", "", "some variants have an x and some have none"),
        ("[agree]", '[plot]\nx = "gpu.speedup"\n[agree]', "variant as-is: plot.x is gpu.speedup"),
        ("[agree]", "[repeat]\nsim = 0\n[agree]", "repeat.sim is 0"),
        ("x = 1\n", "x = 1\nrepeat = { live = 101 }\n", "variant as-is: repeat.live is 101"),
        ('systems = ["basic", "dualpath"]', 'systems = ["basic", "dualpth"]', "did you mean 'dualpath'"),
        ('worlds = ["sim"]', 'worlds = ["real"]', "variant[1].worlds[0] is 'real', but it must be one of live, sim"),
        ("[[expect]]", "[[expct]]", "unknown key 'expct' (did you mean 'expect'?)"),
        ("x = 1\n", "x = nan\n", "variant[0].x is nan, but it must be a finite number"),
        ("x = 1\n", "x = 0\nset = 3\n", "variant[0].set is 3, but it must be a table"),
        ("[agree]", '[plot]\nlog = ["x"]\n[agree]\nratio_tolerance = -1', "agree.ratio_tolerance is -1"),
        ("[agree]", "[repeat]\nsim = 1000000000\n[agree]", "runs 1 to 100 times"),
        ("[agree]", '[agree]\nthroughput = ["fats.basic.jct_s"]', "'fats.basic.jct_s' is of no variant"),
        ("quickstart", "quickstrt", "did you mean 'quickstart'"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_sentence(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert FILE.count(old) >= 1
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, FILE.replace(old, new, 1) if old != "quickstart" else FILE.replace(old, new))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_whole_experiment_is_not_taken_for_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace("[[variant]]", "[[variants]]"))
    assert is_experiment(str(path))
    path.write_text("\n".join(FILE.splitlines()[:4]))
    with pytest.raises(ConfigError, match=r"experiment mine: variant is missing; write \[\[variant\]\] at least once"):
        read_experiment(str(path))
    with pytest.raises(ConfigError, match=r"mine\.toml is an experiment, many runs"):
        read_scenario(str(path))
    of_one_world = FILE.replace('dualpath"]', 'dualpath"]\nworlds = ["sim"]', 1)
    path.write_text(of_one_world.replace("ratio(each.basic", "ratio(fats.basic"))
    with pytest.raises(ConfigError, match="of no variant"):
        read_experiment(str(path))


def end(world: World, variant: str, basic: float, dualpath: float, **more: Any) -> RunEnd:
    systems = {
        "basic": {"jct_s": basic, "working_set": {"life_s": basic / 2}},
        "dualpath": {"jct_s": dualpath, "working_set": {"life_s": dualpath / 2}, "paper": {"jct_s": 2 * dualpath}},
    }
    document: Mapping[str, Any] = {"systems": systems, "failures": [], "invalid_reasons": [], "valid": not more, **more}
    return RunEnd(world=world, variant=variant, folder=f"{world}/{variant}", document=document)


GOOD = (
    end("live", "as-is", 10, 5),
    end("sim", "as-is", 10.4, 5.2),
    end("sim", "fast", 8.1, 4), end("sim", "fast", 9, 4), end("sim", "fast", 90, 4),
)  # fmt: skip


def outcome_of(directory: Path, runs: Sequence[RunEnd]) -> Outcome:
    return judge(read(directory), runs)


def test_medians_are_judged_and_the_worlds_compared(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, GOOD)
    assert outcome.exit_code == 0 and outcome.verdict.startswith(
        "TRUE: 4 of 4 expectations hold, live and sim agree on 3"
    )
    assert outcome.measured["sim"]["fast"]["basic.jct_s"] == 9
    first = outcome.judged[0]
    assert (first.world, first.name, first.numbers) == ("live", "gain (as-is)", "5 < 10")
    assert outcome.measured["live"]["as-is"]["dualpath.paper.jct_s"] == 10


GONE = RunEnd(world="live", variant="as-is", folder="", document=None, error="killed")


@pytest.mark.parametrize(
    ("runs", "code", "sentence"),
    [
        ((*GOOD[:2], end("sim", "fast", 9.5, 4)), 1, "FALSE: 3 of 4 expectations hold"),
        ((end("live", "as-is", 10, 5.6), *GOOD[1:]), 1, "agree on 1 of 3 figures"),
        ((end("live", "as-is", 10, 5, invalid_reasons=["Late."]), *GOOD[1:]), 3, "INVALID: 1 runs"),
        ((*GOOD[:4], end("sim", "fast", 9, 4, failures=["Wrong token."])), 1, "FAILED: 1 runs"),
        ((GONE, *GOOD[1:]), 1, "FAILED: 1"),
        ((replace(GONE, by_host=True), *GOOD[1:]), 2, "FAILED: 1"),
    ],
)
def test_exit_codes(runs: Sequence[RunEnd], code: int, sentence: str, tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, runs)
    assert outcome.exit_code == code and sentence in outcome.verdict
    assert all(why.startswith(("live, as-is: ", "sim, fast: ")) for why in (*outcome.failures, *outcome.troubles))


def test_what_a_kernel_lacks_is_named_and_neither_passed_nor_failed(tmp_path: Path) -> None:
    missing = (Unsupported(world="live", variant="as-is", reason="this kernel has no lanes ets"),)
    outcome = judge(read(tmp_path), GOOD[1:], missing)
    assert outcome.exit_code == 0 and [j.world for j in outcome.judged] == ["sim"] * 3
    assert outcome.verdict == "TRUE: 3 of 3 expectations hold, 1 variants are unsupported here and were not run."
    assert judge(read(tmp_path), (), missing).exit_code == 1  # nothing judged is nothing shown


def test_a_discipline_that_the_kernel_lacks_is_skipped_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = {lanes: "ENOENT" if lanes is LaneDiscipline.ETS else "" for lanes in MODULES}
    monkeypatch.setattr("testbed.fabric.live.lane_offers.kernel_lanes", lambda: lacks)
    path = tmp_path / "tiny.toml"
    text = TINY.replace('worlds = ["sim"]', "").replace("gpu.speedup = 100", 'gpu.speedup = 100, cluster.lanes = "ets"')
    path.write_text(text)
    jobs, unsupported = _jobs(read_experiment(str(path)), ("live", "sim"), ExperimentRequest(experiment="tiny"))
    assert [job.variant for job in jobs["live"]] == ["as-is"] and len(jobs["sim"]) == 5
    (one,) = unsupported
    assert str(one).startswith("UNSUPPORTED live, fast: this kernel has no lanes ets (ENOENT)")
    path.write_text(text.replace("gpu.speedup = 10 ", 'gpu.speedup = 10, cluster.lanes = "ets"'))
    done = cli("run", str(path), "--world", "live", "--out", str(tmp_path / "out"))
    assert done.code == 2 and "no variant of it can run here live; as-is: this kernel has no lanes ets" in done.err
    assert not (tmp_path / "out").exists()


TINY = """
title = "T"
question = "Does it?"
scenario = "quickstart"
worlds = ["sim"]
systems = ["basic", "dualpath"]
set = { workload.agents = 2, workload.max_turns = 2 }
repeat = { sim = 2 }
plot = { x = "gpu.speedup", x_label = "speed" }
[[variant]]
name = "as-is"
set = { gpu.speedup = 10 }
[[variant]]
name = "fast"
set = { gpu.speedup = 100 }
repeat = { live = 9, sim = 3 }
[[expect]]
name = "faster"
claim = "fast.basic.jct_s < as_is.basic.jct_s"
text = "GPUs matter"
[[figure]]
label = "DualPath"
value = "dualpath.jct_s"
panel = "JCT"
"""


def test_a_real_experiment_in_the_sim_world(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    out = tmp_path / "out"
    done = cli("run", str(path), "--out", str(out))
    assert done.code == 0, done.err
    assert "TRUE: 1 of 1 expectations hold." in done.out and "GPUs matter" in done.out
    (folder,) = out.iterdir()
    assert sorted(p.name for p in (folder / "sim").iterdir()) == ["as-is", "as-is-2", "fast", "fast-2", "fast-3"]
    draws = [
        json.loads((folder / "sim" / n / "config.resolved.json").read_text())["sim"]["draw"] for n in ("fast", "fast-3")
    ]
    assert draws == [0, 2]
    assert (folder / "plot-sim.png").stat().st_size > 1000 and (folder / "plot.svg").stat().st_size > 1000
    rows = list(csv.DictReader((folder / "experiment.csv").read_text().splitlines()))
    (jct,) = [r for r in rows if (r["variant"], r["system"], r["metric"]) == ("fast", "basic", "jct_s")]
    document = json.loads((folder / "experiment.json").read_text())
    assert document["exit_code"] == 0 and float(jct["value"]) > 0 and len(document["runs"]) == 5

    before = {p: p.stat().st_mtime_ns for p in folder.glob("sim/*/metrics.json")}
    other = cli("run", str(path), "--set", "workload.agents=3", "--resume", str(folder))
    assert other.code == 2 and "holds a run of another configuration" in other.err
    assert before == {p: p.stat().st_mtime_ns for p in folder.glob("sim/*/metrics.json")}
    broken = folder / "sim" / "fast" / "metrics.json"
    broken.write_text(broken.read_text()[:100])  # the disk was full
    assert cli("run", str(path), "--resume", str(folder), "--quiet").code == 0
    after = {p: p.stat().st_mtime_ns for p in folder.glob("sim/*/metrics.json")}
    assert {p.parent.name for p in before if before[p] != after[p]} == {"fast"}


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        (("= 100", "= -1"), [], "experiment tiny, variant fast: gpu.speedup is -1"),
        (("quickstart", "quickstart"), ["--world", "live"], "does not run in the world 'live'"),
        (("quickstart", "quickstart"), ["--systems", "basic"], "leave out --systems"),
        (("quickstart", "quickstart"), ["--resume", "."], "is no folder of the experiment tiny"),
        (("quickstart", "quickstart"), ["--resume", "20260101-000000-tinyer"], "is no folder of the experiment tiny"),
    ],
)
def test_the_command_refuses_before_anything_starts(
    change: tuple[str, str], options: list[str], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace(*change))
    (tmp_path / "20260101-000000-tinyer").mkdir()
    options = [str(tmp_path / option) if option.startswith("2026") else option for option in options]
    done = cli("run", str(path), "--out", str(tmp_path / "out"), *options)
    assert done.code == 2 and sentence in done.err and not (tmp_path / "out").exists()


def test_nothing_is_resumed_while_somebody_works_on_it_or_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "tiny.toml", tmp_path / "20260101-000000-tiny"
    path.write_text(TINY, encoding="utf-8")
    with locked(folder, "experiment"):
        done = cli("run", str(path), "--resume", str(folder))
    assert done.code == 2 and "another experiment is at work there" in done.err
    monkeypatch.setattr(run_folder, "_SPARE_BYTES", 10**18)
    done = cli("run", str(path), "--resume", str(folder))
    assert done.code == 2 and "free some space" in done.err and not (folder / "sim").exists()


def test_runs_that_the_host_stopped_are_exit_code_2_with_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(folder: Path, loaded: LoadedScenario, request: RunRequest) -> int:
        if folder.name == "fast-2":
            raise HostError("the disk is full.")
        return run_in_folder(folder, loaded, request)

    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(command, "run_in_folder", stopped)
        done = cli("run", str(path), "--out", str(tmp_path / "out"))
    (folder,) = (tmp_path / "out").iterdir()
    assert done.code == 2 and "the disk is full" in done.out
    assert f"testbed run {path} --resume {folder}" in done.err and "this host stopped runs" in done.err
    assert cli("run", str(path), "--resume", str(folder), "--quiet").code == 0


def test_the_command_to_go_on_with_is_whole(tmp_path: Path) -> None:
    request = ExperimentRequest(experiment="a b.toml", world="sim", seed=3, overrides=("workload.agents=2",))
    again = _again(request, tmp_path)
    assert again == f"testbed run 'a b.toml' --set workload.agents=2 --seed 3 --world sim --resume {tmp_path}"


def test_resume_is_for_experiments() -> None:
    done = cli("run", "quickstart", "--resume", ".")
    assert done.code == 2 and "--resume is for experiments" in done.err
