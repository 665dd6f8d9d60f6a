"""`testbed check`: what it prints, its exit codes, its trace files, and what it says about bad input."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed.cli import check as command
from testbed.cli.check_cluster import BUILT_IN, load_config, setup_of
from testbed.cli.main import app
from testbed.errors import ConfigError
from testbed.fabric.check.walk import walk
from tests.check import planted as p

RUNNER = CliRunner()


def _run(*words: str) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["check", *words])
    return result.exit_code, result.output


def test_prints_what_was_covered_and_the_verdict() -> None:
    code, output = _run("1p1d-1r", "--faults", "0")
    assert code == 0
    assert output.startswith("1p1d-1r, no fault: ")
    assert "explored to the end, nothing wrong" in output


def test_only_some_kinds_of_faults() -> None:
    code, output = _run("1p1d-1r-1l-cold", "--faults", "1", "--only", "refuse")
    assert code == 0
    assert output.startswith("1p1d-1r-1l-cold, at most one fault (refuse): ")


def test_without_arguments_the_default_is_explored(monkeypatch: pytest.MonkeyPatch) -> None:
    explored = []
    monkeypatch.setattr(command, "_explore", lambda request, config, faults, kinds: explored.append(config.name) or 0)
    assert _run()[0] == 0
    assert explored == ["1p1d-2r", "1p1d-2turns", "1p1d-2r"]


def test_stops_at_a_bound_and_says_so() -> None:
    code, output = _run("1p1d-2r", "--faults", "1", "--max-states", "5000")
    assert code == command.STOPPED
    assert "STOPPED" in output
    assert "depth" in output


def test_stops_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_memory_bytes", lambda: 10**10)
    code, output = _run("1p1d-2r", "--faults", "1", "--memory-gb", "1")
    assert code == command.STOPPED
    assert "memory has grown to 10.0 GB" in output


def test_a_violation_is_printed_saved_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alter = p.planted(p.LostWakeUp, "pe0gpu0")
    with monkeypatch.context() as patch:
        patch.setattr(command, "setup_of", lambda config: setup_of(config, alter=alter))
        code, output = _run("1p1d-1r", "--faults", "0", "--out", str(tmp_path))
        assert code == 1
        saved = tmp_path / "check-1p1d-1r-progress.json"
        assert f"replay: testbed check --replay {saved}" in output
        assert "1. scheduler takes SubmitRequest(request_id 0.0" in output
        code, again = _run("--replay", str(saved))
        assert code == 1
        assert "VIOLATION of progress" in again
        assert output.splitlines()[1:-1] == again.splitlines()
    code, output = _run("--replay", str(saved))
    assert code == 0
    assert "nothing is wrong any more" in output


def test_random_walks_of_a_larger_cluster() -> None:
    code, output = _run("--random", "--seeds", "12")
    assert code == 0
    assert "12 random walks" in output


def test_random_walks_find_a_planted_mistake_and_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alter = p.planted(p.VisibleBeforeDurable, "de1")
    monkeypatch.setattr(command, "setup_of", lambda config: setup_of(config, alter=alter))
    code, output = _run("--random", "--seeds", "30", "--faults", "0", "--out", str(tmp_path))
    assert code == 1
    assert "VIOLATION of visibility" in output
    code, _ = _run("--replay", str(tmp_path / "check-2p2d-6r-visibility.json"))
    assert code == 1


def test_a_seed_repeats_a_walk() -> None:
    walks = [walk(setup_of(load_config("2p2d-6r")), 1, random.Random(seed).randrange) for seed in (4, 4, 5)]
    assert walks[0].moves == walks[1].moves
    assert walks[0].moves != walks[2].moves


@pytest.mark.parametrize("config", [c for c in BUILT_IN if c != "2p2d-6r"])
def test_random_walks_of_every_built_in_cluster(config: str) -> None:
    for seed in range(8):
        walked = walk(setup_of(load_config(config)), 2, random.Random(seed).randrange)
        assert walked.violations == []
        assert walked.at_end


def test_random_walks_with_copies_past_the_cnic() -> None:
    config = replace(load_config("1p1d-2turns"), system="dualpath-copy-engine")
    for seed in range(4):
        walked = walk(setup_of(config), 2, random.Random(seed).randrange)
        assert walked.violations == []
        assert walked.at_end


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layer = 2", "unknown key layer; the keys are name,"),
        ("layers = 'two'", "Expected `int`, got `str` - at `$.layers`"),
        ("layers = 0", "layers is 0, but it must be positive"),
        ("agents = [[]]", "every agent needs turns"),
        ("agents = [[[1, 1]]]", "first turn is shorter than the 1 stored blocks"),
        ("system = 'oracle'", "system oracle moves no KV"),
        ("layers = ", "Invalid value"),
    ],
)
def test_bad_configurations_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"\.toml|check") as error:
        setup_of(load_config(str(path)))
    assert says in str(error.value)


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("layers = 1\nstored_blocks = 0\nagents = [[[2, 1]]]\n", encoding="utf-8")
    code, output = _run(str(path), "--faults", "0")
    assert code == 0
    assert output.startswith("mine, no fault: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing",), "nothing is neither a configuration (1p1d-2r"),
        (("--faults", "-1"), "--faults is -1"),
        (("--only", "lost"), "no fault is called lost; there are delay, early, lose, refuse, repeat"),
        (("--random", "--seeds", "0"), "--seeds is 0"),
        (("--replay", "nothing.json"), "nothing.json is no file"),
    ],
)
def test_bad_words_are_named(words: tuple[str, ...], says: str) -> None:
    code, output = _run(*words)
    assert code == 2
    assert says in output


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{}", encoding="utf-8")
    code, output = _run("--replay", str(path))
    assert code == 2
    assert "is no trace file" in output
