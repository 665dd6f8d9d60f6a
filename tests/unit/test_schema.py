"""metrics.json, the run folder and the table of a judged run."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from testbed.errors import ConfigError, HostError
from testbed.metrics.ledger import LedgerEntry
from testbed.metrics.metrics import system_metrics
from testbed.metrics.summary import LinkRow, PaperUnits, Summary
from testbed.metrics.verdict import Verdict
from testbed.report import run_folder, tables
from tests.support.runs import RATES, Run, outcome, sample

NOW = datetime(2026, 2, 3, 4, 5, 6)


def runs() -> list[Run]:
    samples = [sample(0, pe0=0, de0=0), sample(10, pe0=9_000, de0=0)]
    return [
        Run(system="basic", outcomes=[outcome(), outcome(1)], samples=samples, tokens_verified=6),
        Run(system="dualpath", outcomes=[outcome(read_side="de"), outcome(1, start_s=-5)], tokens_verified=6),
    ]


def summary(**change: Any) -> Summary:
    metrics = tuple(
        system_metrics(run, kv_bytes_per_token=8, nodes=("pe0", "de0"), rates=RATES) for run in runs()
    )
    whole = Summary(
        scenario="quickstart", world="live", seed=3, stands_for="Stands for [it].", systems=metrics, failures=(),
        scale={"bandwidth": 8000.0, "bytes": 5248.0, "time": 1.5, "length": 16, "agents": 32, "gpus": 1},
        units=PaperUnits(time=1.5, length=16, bytes=5248.0), titles={"basic": "Basic", "dualpath": "DualPath"},
        links=(
            LinkRow(name="pe0.snic.rx", rate_bps=8_000, expected_bps=7_651.0, measured_bps=7_600.0, error=-0.0067,
                    method="measured"),
            LinkRow(name="pe0.dram", rate_bps=90_000, expected_bps=86_000.0, measured_bps=None, error=0.0,
                    method="readback"),
        ),
        ledger=(
            LedgerEntry(system="basic", resource="pe0.dram", expected_bytes=10, measured_bytes=10, error=0.0),
        ),
        verdicts=(
            Verdict(name="gain", expectation="x > 1", measured=1.9, holds=True, text="it gains"),
            Verdict(name="none", expectation="ratio(x, y) > 1", measured=math.nan, holds=False, text=""),
        ),
        invalid_reasons=(),
    )  # fmt: skip
    return replace(whole, **change)


def schema() -> Any:
    return json.loads(resources.files("testbed.report").joinpath("schema", "metrics.schema.json").read_text())


def test_metrics_json_keeps_its_schema(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    run_folder.write_results(tmp_path, summary(), runs())
    document = json.loads((tmp_path / "metrics.json").read_text())
    jsonschema.validate(document, schema())
    assert document["valid"] is True and document["systems"]["basic"]["jct_s"] == 10.0
    assert document["systems"]["basic"]["paper"]["jct_s"] == pytest.approx(10 / 1.5)
    assert document["verdicts"][1]["measured"] is None  # JSON has no NaN
    assert not (tmp_path / "failure.txt").exists()


@pytest.mark.parametrize("key", ["valid", "systems", "links", "ledger", "verdicts", "invalid_reasons", "scale", "seed"])
def test_the_schema_misses_what_is_missing(key: str) -> None:
    document = json.loads(json.dumps(summary().document()))
    del document[key]
    with pytest.raises(jsonschema.ValidationError, match=key):
        jsonschema.validate(document, schema())


@pytest.mark.parametrize(
    ("change", "valid", "code"),
    [
        ({}, True, 0),
        ({"failures": ("a token",)}, False, 1),
        ({"invalid_reasons": ("a drop",)}, False, 3),
        ({"failures": ("a token",), "invalid_reasons": ("a drop",)}, False, 1),
    ],
)
def test_exit_codes_and_reasons(tmp_path: Path, change: dict[str, Any], valid: bool, code: int) -> None:
    judged = summary(**change)
    assert (judged.valid, judged.exit_code) == (valid, code)
    run_folder.write_results(tmp_path, judged, runs())
    reasons = [r for value in change.values() for r in value]
    text = (tmp_path / "failure.txt").read_text().splitlines() if reasons else []
    assert text == reasons


def test_requests_and_links_as_tables(tmp_path: Path) -> None:
    run_folder.write_results(tmp_path, summary(), runs())
    rows = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert [(r["system"], r["agent"], r["submitted_s"], r["completed_s"]) for r in rows] == [
        ("basic", "0", "0.000000", "10.000000"),
        ("basic", "1", "0.000000", "10.000000"),
        ("dualpath", "0", "5.000000", "15.000000"),
        ("dualpath", "1", "0.000000", "10.000000"),
    ]
    links = list(csv.DictReader((tmp_path / "links.csv").open()))
    assert [(link["name"], link["measured_bps"], link["error"], link["method"]) for link in links] == [
        ("pe0.snic.rx", "7600.0", "-0.0067", "measured"),
        ("pe0.dram", "", "0.0", "readback"),
    ]


def test_a_run_folder_is_new_each_time(tmp_path: Path) -> None:
    first, second = (run_folder.create(tmp_path / "runs", "x", NOW) for _ in range(2))
    assert (first.name, second.name) == ("20260203-040506-x", "20260203-040506-x-2")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*file: no run folder can be made there"):
        run_folder.create(tmp_path / "file", "x", NOW)


def test_configuration_and_environment_are_kept(tmp_path: Path) -> None:
    run_folder.write_configuration(tmp_path, {"seed": 5, "title": "t"}, ["testbed", "run"])
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["seed"] == 5 and environment["command"] == ["testbed", "run"]
    assert environment["python"] and environment["packages"]["msgspec"]
    assert json.loads((tmp_path / "config.resolved.json").read_text()) == {"seed": 5, "title": "t"}


def test_a_full_disk_is_seen_before(tmp_path: Path) -> None:
    run_folder.check_space(tmp_path, 0)
    with pytest.raises(HostError, match=r"MB are free, but this run may store .* --out"):
        run_folder.check_space(tmp_path, 10**18)


def test_blocks_of_a_run_cut_short_go(tmp_path: Path) -> None:
    for directory in ("warm", "basic/storage/st0", "basic/trace"):
        (tmp_path / directory).mkdir(parents=True)
    run_folder.drop_blocks(tmp_path)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == ["basic", "basic/trace"]


def text_of(judged: Summary) -> str:
    with io.StringIO() as text:
        tables.print_summary(Console(width=200, file=text), judged)
        return text.getvalue()


def test_the_table_says_everything() -> None:
    text = text_of(summary())
    for part in (
        "JCT", "10.00", "15.00", "TTFT", "5.000 / 5.000 / 5.000", "TTST", "TPOT", "pe0 SNIC busy", "90% /", "6 of 6",
        "hits of first turns, tokens", "128", "it gains", "yes", "NO",
        "DualPath: 0.67x the speed of Basic (JCT 10.00 s -> 15.00 s).",
        "Run valid: 1 links measured, 1 read back", "largest error 0.67%", "12 of 12 tokens equal the reference",
    ):  # fmt: skip
        assert part in text, part


def test_the_table_says_what_is_wrong() -> None:
    text = text_of(summary(failures=("token [3] is wrong.",), invalid_reasons=("pe0.dram dropped.",)))
    assert "Run FAILED" in text and "FAILED: token [3] is wrong." in text and "INVALID: pe0.dram dropped." in text
    assert "Run INVALID: do not use these numbers" in text_of(summary(invalid_reasons=("x",)))
