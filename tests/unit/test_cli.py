"""The command line: bad input is one sentence on stderr and the right exit code; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from typer.testing import CliRunner

import testbed.cli.run as run_module
from testbed.cli.janitor import cleaning_up
from testbed.cli.main import app
from testbed.cli.run import stored_bytes
from testbed.errors import HostError, RunFailedError
from testbed.fabric.recording import Recording
from testbed.metrics.summary import LinkRow
from testbed.runtime.plan import RunPlan
from testbed.runtime.result import RunResult
from tests.support.runs import Link, Run, outcome
from tests.unit.test_schema import schema

runner = CliRunner()
LINK = LinkRow(
    name="pe0.snic.rx", rate_bps=50_000_000, expected_bps=47.8e6, measured_bps=47.8e6, error=0.0, method="measured"
)


def testbed(*arguments: str) -> SimpleNamespace:
    done = runner.invoke(app, list(arguments))
    return SimpleNamespace(code=done.exit_code, out=done.stdout, err=done.stderr)


testbed.__test__ = False  # type: ignore[attr-defined]  # a helper, whatever its name begins with


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "quickstrt"], "unknown scenario 'quickstrt' (did you mean 'quickstart'?)"),
        (["run", "quickstart", "--set", "scale.bandwith=1"], "(did you mean 'scale.bandwidth'?)"),
        (["run", "quickstart", "--systems", "basik"], "unknown system 'basik' (did you mean 'basic'?)"),
        (["run", "quickstart", "--set", "topology=48p96d"], "run it with --world sim"),
        (["run", "quickstart", "--set", "cluster.s=0"], "s is 0"),
        (["run", "swe-agent", "--set", "workload.path=/no/such.traj"], "/no/such.traj: cannot be read"),
        (["run", "quickstart", "--seed", "-1"], "seed is -1"),
        (["scale", "nothing"], "unknown scenario 'nothing'"),
        (["topo", "1p3d"], "unknown topology or scenario '1p3d' (did you mean"),
        (["shell", "2p4"], "(did you mean '2p4d'?)"),
        (["runn"], "No such command 'runn'"),
        (["run", "quickstart", "--sede", "1"], "No such option: --sede"),
        (["run", "quickstart", "--seed", "x"], "Invalid value for '--seed'"),
        (["run", "quickstart", "twice"], "twice"),
        (["sweep"], "Missing argument 'file'"),
    ],
)
def test_bad_input_is_a_sentence_and_code_2(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "runs")] if arguments[0] == "run" else []
    done = testbed(*arguments, *out)
    assert done.code == 2 and sentence in done.err and done.out == ""
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_nothing_asked_for_is_help() -> None:
    done = testbed()
    assert done.code == 0 and "calibrate" in done.out and done.err == ""
    assert testbed("run", "--help").code == 0


def test_an_expectation_that_is_none_is_refused_before_the_run(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    shipped = Path(run_module.__file__).parents[2] / "scenarios" / "quickstart.toml"
    mine.write_text(shipped.read_text() + '\n[[expect]]\nname="x"\nmetric="open(1)"\n')
    done = testbed("run", str(mine), "--out", str(tmp_path / "runs"))
    assert done.code == 2 and "compares nothing" in done.err and not (tmp_path / "runs").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    done = testbed("run", "quickstart", "--out", str(tmp_path / "runs"))
    assert done.code == 2 and "no run folder can be made there" in done.err


@pytest.mark.parametrize("way", ["direct", "link"])
def test_an_output_that_the_sandbox_hides_is_refused(way: str, tmp_path: Path) -> None:
    out = Path("/run/testbed-of-nobody")
    if way == "link":
        (tmp_path / "link").symlink_to("/run")
        out = tmp_path / "link" / "testbed-of-nobody"
    done = testbed("run", "quickstart", "--out", str(out))
    assert done.code == 2 and "/run/testbed-of-nobody is below /run" in done.err and "--out" in done.err
    assert not Path("/run/testbed-of-nobody").exists()


def test_lists_scales_and_trees() -> None:
    listed = testbed("list")
    assert listed.code == 0 and all(name in listed.out for name in ("quickstart", "2p4d", "dual-path-rr", "ds-660b"))
    assert "400 Gbit/s" in testbed("scale", "quickstart").out
    tree = testbed("topo", "1p2d", "--set", "cluster.gpus_per_node=2", "--set", "scale.bandwidth=8000").out
    assert "de1gpu1 behind de1.cnic1, 50 Mbit/s" in tree and "de1gpu2" not in tree
    assert "pe1gpu7" in testbed("topo", "two-pe-four-de").out


Live = Callable[[RunPlan, Callable[[str, float], None]], RunResult]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[[Live], None]:
    """Replace the live run; the sandbox is left out."""

    def use(body: Live) -> None:
        monkeypatch.setattr(run_module, "run_live", body)
        monkeypatch.setattr(run_module, "run_in_sandbox", lambda entry: entry())

    return use


def perfect(plan: RunPlan, *, cpu_share: float = 0.5, wrong: bool = False, full: bool = False) -> SimpleNamespace:
    """A run in which every round takes 10 s and reads nothing, so that idle counters settle the ledger."""
    runs = []
    for system in plan.systems:
        outcomes = [
            outcome(a, t, start_s=10.0 * t, hit_tokens=0, tokens=dict.fromkeys(range(s.generate_tokens(t)), 1))
            for a, s in enumerate(plan.scripts)
            for t in range(s.turns)
        ]
        tokens = sum(len(o.tokens) for o in outcomes)
        run = Run(system=system.name, outcomes=outcomes, host_cpu_share=cpu_share, tokens_verified=tokens)
        run.wrong_tokens = ["agent0 turn 0: token 0 is 1, the reference says 2"] if wrong else []
        runs.append(run)
    recordings = [
        Recording(link=link, file=str(plan.run_dir / f"{link}.pcap"), failure=f"{link}: no space" if full else "")
        for link in plan.capture
    ]
    links = [Link(name="pe0.snic.rx", error=0.0)]
    return SimpleNamespace(links=links, shaping_faults=[], systems=runs, recordings=recordings)


def only_folder(out: Path) -> Path:
    (folder,) = out.iterdir()
    return folder


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ({}, 0, "Run valid"),
        ({"wrong": True}, 1, "wrong tokens"),
        ({"cpu_share": 0.99}, 3, "99% of the host's CPU"),
    ],
)
def test_a_run_is_judged_and_kept(
    live: Callable[[Live], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, float],
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr("testbed.cli.judge._link_row", lambda link: LINK)
    live(lambda plan, progress: perfect(plan, **fault))  # type: ignore[arg-type,return-value]
    done = testbed("run", "quickstart", "--out", str(tmp_path), "--systems", "dualpath", "--seed", "9")
    assert done.code == code, done.err
    assert done.out.startswith("Stands for DS 27B") and said in " ".join(done.out.split())
    folder = only_folder(tmp_path)
    document = json.loads((folder / "metrics.json").read_text())
    jsonschema.validate(document, schema())
    assert document["valid"] is (code == 0) and document["seed"] == 9 and list(document["systems"]) == ["dualpath"]
    assert (folder / "failure.txt").exists() is (code != 0)


@pytest.mark.parametrize("full", [False, True])
def test_a_capture_that_fails_costs_its_file_and_not_the_run(
    live: Callable[[Live], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    monkeypatch.setattr("testbed.cli.judge._link_row", lambda link: LINK)
    live(lambda plan, progress: perfect(plan, full=full))  # type: ignore[arg-type,return-value]
    done = testbed("run", "quickstart", "--out", str(tmp_path), "--capture", "pe0.cnic0, pe0.snic")
    folder = only_folder(tmp_path)
    assert json.loads((folder / "metrics.json").read_text())["valid"]
    captures = json.loads((folder / "captures.json").read_text())["captures"]
    assert [(one["link"], one["file"]) for one in captures] == [(x, f"{x}.pcap") for x in ("pe0.cnic0", "pe0.snic")]
    assert "Capture of pe0.snic: 0 packets" in " ".join(done.out.split())
    assert done.code == (2 if full else 0)
    assert done.err.splitlines()[-2:] == (["error: pe0.cnic0: no space", "error: pe0.snic: no space"] if full else [])
    assert (folder / "failure.txt").exists() is full


def test_quiet_prints_errors_only(
    live: Callable[[Live], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testbed.cli.judge._link_row", lambda link: LINK)
    live(lambda plan, progress: perfect(plan))  # type: ignore[arg-type,return-value]
    done = testbed("run", "quickstart", "--out", str(tmp_path), "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RunFailedError("role st0 died: no more memory"), 1, "role st0 died: no more memory"),
        (HostError("user namespaces are forbidden: set x"), 2, "user namespaces are forbidden"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("division by zero"), 1, "internal error: ZeroDivisionError"),
    ],
)
def test_a_run_that_ends_badly_says_why(
    live: Callable[[Live], None], tmp_path: Path, error: BaseException, code: int, said: str
) -> None:
    def fail(plan: RunPlan, progress: object) -> RunResult:
        storage = plan.run_dir / "basic" / "storage"
        storage.mkdir(parents=True)
        raise error

    live(fail)
    done = testbed("run", "quickstart", "--out", str(tmp_path))
    assert done.code == code and said in done.err and "Traceback" not in done.err
    folder = only_folder(tmp_path)
    assert not (folder / "basic" / "storage").exists()
    assert said in (folder / "failure.txt").read_text()


def test_the_space_a_run_needs_covers_what_it_stores() -> None:
    plan = run_module.prepare(run_module.RunRequest(scenario="quickstart")).plan
    layout = plan.params.layout
    longest = max(script.trajectory.total_tokens for script in plan.scripts)
    assert stored_bytes(plan) > 2 * layout.full_blocks(longest) * layout.full_block_bytes


def test_a_janitor_that_was_killed_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    fork = os.fork

    def remembered() -> int:
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", remembered)
    with cleaning_up(tmp_path):
        os.kill(pids[0], signal.SIGKILL)
        os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)  # dead, so that the pipe has no reader


def test_a_killed_supervisor_leaves_no_blocks(tmp_path: Path) -> None:
    storage = tmp_path / "basic" / "storage" / "st0"
    storage.mkdir(parents=True)
    (storage / "block.kv").write_text("kv")
    code = f"""
import os, pathlib
from testbed.cli.janitor import cleaning_up
with cleaning_up(pathlib.Path({str(tmp_path)!r})):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    deadline = time.monotonic() + 10
    while (tmp_path / "basic" / "storage").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not (tmp_path / "basic" / "storage").exists() and (tmp_path / "failure.txt").read_text() == "killed\n"
