"""Sweeps: what a file expands to, what is kept and what runs again, and that the table does not know of workers."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import testbed.cli.sweep as command
from testbed.cli.main import app
from testbed.cli.run import RunRequest, run
from testbed.errors import ConfigError, HostError
from testbed.sweep.file import Sweep, read_sweep
from testbed.sweep.jobs import Job, finished
from testbed.sweep.pool import Task, run_all
from testbed.sweep.sweep import Outcome, jobs_of, run_sweep
from testbed.sweep.table import DEFAULT_METRICS, check_metric, known_metrics

GRID = """
scenario = "quickstart"
seeds = [1, 2]
systems = ["basic", "dualpath"]
metrics = ["jct_s", "ttft_s.mean", "snic_utilisation.pe7.run"]
[grid]
"workload.agents" = [2, 4]
protocol.layer_group = [15, 30]
"""


def file_of(directory: Path, text: str = GRID) -> Path:
    path = directory / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def sweep_of(directory: Path, text: str = GRID) -> Sweep:
    return read_sweep(file_of(directory, text))


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_the_last_key_fastest(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    assert sweep.keys == ("workload.agents", "protocol.layer_group")
    assert [[value for _, value in point] for point in sweep.points] == [
        ["2", "15"], ["2", "30"], ["4", "15"], ["4", "30"],
    ]  # fmt: skip
    assert (sweep.name, sweep.world, sweep.seeds) == ("mine", "sim", (1, 2))


def test_points_keep_their_order_and_may_differ_in_keys(tmp_path: Path) -> None:
    text = 'scenario = "quickstart"\n[[points]]\n"gpu.speedup" = 2.5\n[[points]]\n[points.workload]\nagents = 3\n'
    sweep = sweep_of(tmp_path, text)
    assert sweep.points == ((("gpu.speedup", "2.5"),), (("workload.agents", "3"),))
    assert sweep.keys == ("gpu.speedup", "workload.agents")
    assert sweep.seeds == (None,) and sweep.metrics == DEFAULT_METRICS


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GRID.replace("seeds", "seds"), "unknown key 'seds' (did you mean 'seeds'?)"),
        (GRID.replace("workload.agents", "workload.agent"), "'workload.agent' (did you mean 'workload.agents'?)"),
        (GRID.replace("ttft_s.mean", "ttft_s.men"), "unknown metric 'ttft_s.men' (did you mean 'ttft_s.mean'?)"),
        (GRID.replace("ttft_s.mean", "ttft_s"), "is a table; take one of ttft_s.mean, ttft_s.p50, ttft_s.p99"),
        (GRID.replace("[2, 4]", "2"), "grid.workload.agents is 2, but it must be a list"),
        (GRID.replace("[2, 4]", "[]"), "must be a list of at least one value"),
        (GRID.replace("[2, 4]", "[2, 2]"), "points 1 and 3 are the same"),
        (GRID.replace("[1, 2]", "[1, 1]"), "each can run once"),
        (GRID.replace('"workload.agents"', "seed"), "use the key seeds"),
        (GRID.replace('"workload.agents"', "workload"), "'workload' is a table"),
        (GRID + "[[points]]\nseed = 1\n", "has a grid and points"),
        ('scenario = "quickstart"\n', "neither a grid nor points"),
        (GRID + "x = 1 = 2\n", "is not TOML"),
        ('world = "lively"\n' + GRID, "world is 'lively', but it must be one of live, sim"),
        ("", "scenario is missing; give it a text"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_of(tmp_path, text)
    assert sentence in str(caught.value) and "mine.toml" in str(caught.value)


def test_a_scenario_file_lies_beside_its_sweep(tmp_path: Path) -> None:
    assert sweep_of(tmp_path, GRID.replace("quickstart", "own.toml")).scenario == str(tmp_path / "own.toml")


def test_every_default_metric_exists() -> None:
    for name in DEFAULT_METRICS:
        check_metric(name, "here")
    assert "paper.tpot_s.p99" in known_metrics() and "system" not in known_metrics()


# --- running, with a stub for the runs --------------------------------------------------------------------------------


def resolve(job: Job) -> Mapping[str, Any]:
    if ("workload.agents", "13") in job.settings:
        raise ConfigError("13 agents cannot run.")
    return {"seed": job.seed, "systems": ("basic", "dualpath"), **dict(job.settings)}


def stub(job: Job, out: Path) -> int:
    """Writes what a run writes; later points are faster, so that they end before earlier ones; counts itself."""
    settings = dict(job.settings)
    time.sleep(0.05 / int(settings["workload.agents"]))
    with (out.parent.parent / "started").open("a") as log:
        log.write(f"{job.point}\n")
    match settings.get("gpu.speedup"):
        case "1":
            os.kill(os.getpid(), signal.SIGKILL)
        case "2":
            sys.stderr.write("error: the disk is full.\n")
            return 2
    folder = out / "20261130-000000-quickstart"
    folder.mkdir()
    (folder / "config.resolved.json").write_text(json.dumps(job.resolved))
    values = {"jct_s": job.point + 0.125, "ttft_s": {"mean": job.seed}, "snic_utilisation": {}}
    systems = {system: values for system in job.resolved["systems"]}
    failures = ["a token was wrong"] if settings.get("gpu.speedup") == "3" else []
    document = {"world": job.world, "valid": not failures, "failures": failures, "systems": systems}
    (folder / "metrics.json").write_text(json.dumps(document))
    return len(failures)


def go(sweep: Sweep, folder: Path, *, workers: int = 2, resume: bool = False) -> Outcome:
    jobs = jobs_of(sweep, resolve)
    return run_sweep(sweep, jobs, stub, folder, workers=workers, resume=resume, progress=lambda stage, share: None)


def started(folder: Path) -> int:
    return len((folder / "started").read_text().splitlines())


def test_the_table_does_not_know_of_workers(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    tables = [go(sweep, tmp_path / str(n), workers=n).table.read_bytes() for n in (1, 2, 5)]
    assert tables[0] == tables[1] == tables[2]
    rows = list(csv.reader(tables[0].decode().splitlines()))
    assert rows[0] == [
        "point", "workload.agents", "protocol.layer_group", "seed", "system", "valid", "error", "jct_s", "ttft_s.mean",
        "snic_utilisation.pe7.run", "run",
    ]  # fmt: skip
    assert len(rows) == 1 + 4 * 2 * 2
    assert rows[3][:10] == ["1", "2", "15", "2", "basic", "true", "", "1.125", "2", ""]
    assert [row[0] for row in rows[1:]] == [str(p) for p in (1, 2, 3, 4) for _ in range(4)]


def test_resume_keeps_what_is_whole_and_redoes_the_rest(tmp_path: Path) -> None:
    sweep, folder = sweep_of(tmp_path), tmp_path / "out"
    whole = go(sweep, folder).table.read_bytes()
    jobs = jobs_of(sweep, resolve)
    halves = [next((folder / job.run).glob("2026*")) for job in jobs[:4]]
    (halves[0] / "metrics.json").unlink()
    (halves[1] / "metrics.json").write_text('{"world": "sim", "valid": tr')
    (halves[2] / "config.resolved.json").write_text('{"seed": 99}')
    (halves[3] / "metrics.json").write_text("[]")
    (halves[0] / "left.over").write_text("")
    (folder / "sweep.csv").unlink()
    again = go(sweep, folder, resume=True)
    assert again.kept == 4 and started(folder) == 8 + 4
    assert again.table.read_bytes() == whole
    assert not (halves[0] / "left.over").exists()
    assert go(sweep, folder, resume=True).kept == 8 and started(folder) == 12


def test_a_file_may_grow_without_losing_what_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    go(sweep_of(tmp_path), folder)
    assert go(sweep_of(tmp_path, GRID.replace("[2, 4]", "[6, 4, 2]")), folder, resume=True).kept == 8


def test_without_resume_nothing_is_touched(tmp_path: Path) -> None:
    sweep, folder = sweep_of(tmp_path), tmp_path / "out"
    go(sweep, folder)
    with pytest.raises(ConfigError, match="--resume"):
        go(sweep, folder)
    assert started(folder) == 8


def test_runs_that_fail_or_are_killed_are_rows_and_cost_no_other(tmp_path: Path) -> None:
    text = GRID.replace("protocol.layer_group = [15, 30]", '"gpu.speedup" = [1, 2, 3, 4]').replace("[1, 2]", "[1]")
    sweep, folder = sweep_of(tmp_path, text), tmp_path / "out"
    outcome = go(sweep, folder)
    assert [row.error for row in outcome.rows[:4]] == [
        "ended by SIGKILL", "the disk is full.", "a token was wrong", "",
    ]  # fmt: skip
    assert len(outcome.failed) == 6 and not outcome.invalid and outcome.by_host
    rows = list(csv.DictReader(outcome.table.read_text().splitlines()))
    assert [(row["valid"], row["jct_s"]) for row in rows[::2][:4]] == [
        ("", ""), ("", ""), ("false", "3.125"), ("true", "4.125"),
    ]  # fmt: skip
    assert go(sweep, folder, resume=True).kept == 4  # a run with a verdict is done; one without runs again


def test_a_point_that_cannot_run_stops_everything_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sweep mine, point 3: 13 agents cannot run\."):
        jobs_of(sweep_of(tmp_path, GRID.replace("[2, 4]", "[2, 13]")), resolve)


def test_two_sweeps_in_one_folder_are_refused(tmp_path: Path) -> None:
    sweep, folder = sweep_of(tmp_path), tmp_path / "out"

    def inner(job: Job, out: Path) -> int:
        with pytest.raises(HostError, match="another sweep is at work"):
            go(sweep, folder, resume=True)
        return 7

    jobs = jobs_of(sweep, resolve)[:1]
    outcome = run_sweep(sweep, jobs, inner, folder, workers=1, resume=False, progress=lambda stage, share: None)
    assert outcome.rows[0].error == "ended with exit code 7"


def test_an_interruption_ends_the_runs_and_keeps_what_is_done(tmp_path: Path) -> None:
    sweep, folder = sweep_of(tmp_path), tmp_path / "out"
    jobs = jobs_of(sweep, resolve)

    def slow(job: Job, out: Path) -> int:
        if job is jobs[3]:
            os.kill(os.getppid(), signal.SIGINT)  # what Ctrl-C does to the sweep
            time.sleep(60)
        return stub(job, out)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, jobs, slow, folder, workers=1, resume=False, progress=lambda stage, share: None)
    assert time.monotonic() - begun < 30
    assert [finished(job, folder) is not None for job in jobs] == [True] * 3 + [False] * 5
    assert not multiprocessing.active_children()
    assert go(sweep, folder, resume=True).kept == 3


def test_an_interruption_that_another_thread_takes_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[int] = []

    def start_and_be_interrupted(process: ForkProcess) -> None:
        start(process)
        assert process.pid is not None
        forked.append(process.pid)
        signal.pthread_kill(thread.ident or 0, signal.SIGINT)
        assert os.read(taken, 1) == bytes([signal.SIGINT])  # and Python now owes this thread the handler

    def work(subject: int) -> int:
        time.sleep(60)
        return 0

    start = ForkProcess.start
    monkeypatch.setattr(ForkProcess, "start", start_and_be_interrupted)
    taken, told = os.pipe()
    os.set_blocking(told, False)
    before, over = signal.set_wakeup_fd(told), threading.Event()
    thread = threading.Thread(target=over.wait)  # like those of NumPy's BLAS: it blocks no signal
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all([Task(subject=1, output=tmp_path / "1.txt")], work, 1, lambda subject, code: None)
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        thread.join()
        os.close(taken)
        os.close(told)
    with pytest.raises(ProcessLookupError):
        os.kill(forked[0], 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_never_more_processes_than_workers(tmp_path: Path) -> None:
    gauge = tmp_path / "gauge"
    gauge.mkdir()

    def work(number: int) -> int:
        (gauge / str(number)).touch()
        time.sleep(0.05)
        most = len(list(gauge.iterdir()))
        (gauge / str(number)).unlink()
        return most

    said: list[int] = []
    tasks = [Task(subject=n, output=tmp_path / f"{n}.txt") for n in range(8)]
    run_all(tasks, work, 3, lambda subject, code: said.append(code))
    most = [code for code in said if code]
    assert len(most) == 8 and 2 <= max(most) <= 3


# --- the command ---------------------------------------------------------------------------------------------------

MAIN = "from testbed.cli.main import main; main()"
TINY = """
scenario = "quickstart"
seeds = [1, 2]
systems = ["basic", "dualpath"]
metrics = ["jct_s", "requests"]
[grid]
"workload.agents" = [2, 4]
"workload.max_turns" = [2]
"""


def test_a_real_sweep_in_the_sim_world(tmp_path: Path) -> None:
    path = file_of(tmp_path, TINY)
    tables = []
    for workers in ("1", "2"):
        out = tmp_path / workers
        done = CliRunner().invoke(app, ["sweep", str(path), "--workers", workers, "--out", str(out)])
        assert done.exit_code == 0, done.output
        tables.append((out / "mine" / "sweep.csv").read_bytes())
    assert tables[0] == tables[1]
    rows = list(csv.DictReader(tables[0].decode().splitlines()))
    assert [row["requests"] for row in rows[:4]] == ["4"] * 4
    assert [row["requests"] for row in rows[4::2]] == [row["requests"] for row in rows[5::2]]  # of both systems
    assert all(float(row["jct_s"]) > 0 and row["valid"] == "true" for row in rows)
    again = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "1"), "--resume"])
    assert again.exit_code == 0 and "4 runs, 4 of them from before" in again.output


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        (("[2, 4]", '[2, "two"]'), [], "point 2: --set workload.agents=two: workload.agents is 'two'"),
        (("quickstart", "quickstrt"), [], "unknown scenario 'quickstrt' (did you mean 'quickstart'?)"),
        (('"basic", ', '"basik", '), [], "did you mean 'basic'"),
        (("seeds", 'world = "live"\nseeds'), ["--workers", "2"], "would falsify each other"),
        (("seeds", "seeds"), ["--workers", "-1"], "--workers is -1"),
    ],
)
def test_the_command_refuses_before_anything_starts(
    change: tuple[str, str], options: list[str], sentence: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path, TINY.replace(*change))
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 2 and sentence in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_failing_run_is_exit_code_1_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: RunRequest) -> int:
        if "workload.agents=4" in request.overrides:
            raise RuntimeError("boom")
        return run(request)

    monkeypatch.setattr(command, "run", broken)
    path = file_of(tmp_path, TINY.replace("[1, 2]", "[1]"))
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert (
        "failed: point 2 (workload.agents=4, workload.max_turns=2), seed 1: internal error: RuntimeError: boom"
        in done.stderr
    )
    assert done.stderr.count("failed:") == 1


def test_a_run_that_the_host_stopped_is_exit_code_2_with_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(request: RunRequest) -> int:
        if full and "workload.agents=4" in request.overrides:
            raise HostError("the disk is full.")
        return run(request)

    full = True
    monkeypatch.setattr(command, "run", stopped)
    arguments = ["sweep", str(file_of(tmp_path, TINY.replace("[1, 2]", "[1]"))), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "seed 1: the disk is full." in done.stderr and "--resume does what is missing" in done.stderr
    full = False
    assert CliRunner().invoke(app, [*arguments, "--resume"]).exit_code == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_what_is_done(tmp_path: Path, how: signal.Signals) -> None:
    """The real command in a process of its own, interrupted while it runs."""
    path = file_of(tmp_path, TINY.replace("[2, 4]", "[2, 40, 41, 42]").replace("[1, 2]", "[1]"))
    arguments = [sys.executable, "-c", MAIN, "sweep", str(path), "--workers", "1", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    runs = tmp_path / "out" / "mine" / "runs"
    deadline = time.monotonic() + 60
    while not list(runs.glob("*/*/metrics.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + how
    assert "of 4 runs are in" in said and "--resume does the rest" in said and "Traceback" not in said
    assert list(runs.glob("*/*/metrics.json"))


KILLED = """
import os, sys, time
from pathlib import Path
from testbed.sweep.pool import Task, run_all

def work(subject):
    try:
        print(os.getpid(), flush=True)
        while True:
            time.sleep(0.05)  # not signal.pause: what comes just before it would be missed
    except KeyboardInterrupt:
        print("tidied up")

run_all([Task(subject=0, output=Path(sys.argv[1]))], work, 1, lambda job, code: None)
"""


def test_runs_end_with_a_sweep_that_is_killed(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(output)])
    deadline = time.monotonic() + 20
    while not (output.exists() and output.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.01)
    run = Path("/proc") / output.read_text().split("\n")[0] / "stat"
    process.kill()
    process.wait()
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended and been reaped meanwhile
        while ") Z " not in run.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert time.monotonic() < deadline
    assert output.read_text().endswith("tidied up\n")


def test_a_run_whose_output_cannot_be_written_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ends: list[int] = []
    missing = tmp_path / "missing" / "output.txt"
    run_all([Task(subject=0, output=missing)], lambda _: 0, 1, lambda _, code: ends.append(code))
    assert ends == [2]
    assert capfd.readouterr().err == f"error: {missing}: cannot be written (No such file or directory)\n"


def test_the_examples_of_the_page_are_sweeps(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text(encoding="utf-8")
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert [len(jobs_of(sweep_of(tmp_path, example), command._resolved)) for example in examples] == [18, 2]
