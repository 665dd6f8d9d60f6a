"""Validity, failure, and expectations: every reason is a sentence, and nothing is evaluated that is not arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from testbed.errors import ConfigError
from testbed.metrics.expression import check_expression, evaluate
from testbed.metrics.ledger import LedgerEntry
from testbed.metrics.metrics import system_metrics
from testbed.metrics.verdict import Claim, Limits, failure_reasons, flatten, invalid_reasons, judge
from tests.support.runs import RATES, Link, Result, Run, counter, outcome, sample

LIMITS = Limits(link_tolerance=0.02, ledger_tolerance=0.02, lag_p99_ms=50, cpu_share=0.95)
NUMBERS = {"a.x": 4.0, "b.x": 2.0, "b.zero": 0.0, "dual_path_rr.t.mean": 1.5}


def entry(error: float, resource: str = "pe0.snic.rx", system: str = "basic") -> LedgerEntry:
    return LedgerEntry(system=system, resource=resource, expected_bytes=100, measured_bytes=100, error=error)


def test_a_clean_run_is_valid() -> None:
    run = Run(outcomes=[outcome()], tokens_verified=3, counters={"pe0.dram": counter("pe0.dram", 5)})
    result = Result(links=[Link(name="pe0.snic.rx", error=0.019)], systems=[run])
    assert invalid_reasons(result, [entry(-0.019)], LIMITS) == []
    assert failure_reasons([run], 1) == []


@pytest.mark.parametrize(
    ("change", "ledger", "sentence"),
    [
        (
            {"packets_dropped": 7, "counters": {"pe0.dram": counter("pe0.dram", 5, drops=7)}},
            [],
            "7 packets were dropped, pe0.dram 7",
        ),
        ({"packets_dropped": 1}, [], "1 packets were dropped, at interfaces"),
        ({"reports": {"de0": {"machine": {"blocks_given_up": 2}}}}, [], "de0 gave up storing 2 blocks"),
        ({"reports": {"de0": {"data": {"writes_corrupt": 1}}}}, [], "de0: 1 writes landed with a wrong seal"),
        ({"reports": {"pe0gpu0": {"compute": {"busy_ns": 10**9, "overrun_ns": 21_000_000}}}}, [], "took 21 ms more"),
        ({}, [entry(0.021)], "ledger is off by more than 2.0%, pe0.snic.rx +2.1%"),
        ({}, [entry(-0.5)], "pe0.snic.rx -50.0%."),
        (
            {"segments_resent": {"pe0": 1, "pe0gpu3": 290, "de0": 0}},
            [entry(0.021)],
            "pe0.snic.rx +2.1%; TCP sent 291 segments twice, 290 of them from pe0gpu3.",
        ),
        ({"reports": {"st0": {"lag_p99_ns": 51_000_000}}}, [], "99th percentile above 50 ms), st0 51 ms"),
        ({"host_cpu_share": 0.96}, [], "96% of the host's CPU time"),
    ],
)
def test_what_makes_a_system_untrustworthy(
    change: Mapping[str, object], ledger: list[LedgerEntry], sentence: str
) -> None:
    reasons = invalid_reasons(Result(systems=[Run(**change)]), ledger, LIMITS)  # type: ignore[arg-type]
    assert len(reasons) == 1 and sentence in reasons[0]
    assert reasons[0].startswith("basic: ") and reasons[0].endswith(".")


def test_a_gpu_that_is_hardly_late_is_no_reason() -> None:
    late = {"pe0gpu0": {"compute": {"busy_ns": 10**9, "overrun_ns": 19_000_000}, "data": {"writes_refused": 0}}}
    assert invalid_reasons(Result(systems=[Run(reports=late)]), [], LIMITS) == []


def test_links_and_shaping_make_a_run_untrustworthy() -> None:
    links = [Link(name=f"pe0.cnic{i}.read", error=-0.05) for i in range(5)]
    reasons = invalid_reasons(Result(links=links, shaping_faults=["pe0.snic.rx has 40 Mbit/s."]), [], LIMITS)
    assert reasons == [
        "Shaping differs from the specification: pe0.snic.rx has 40 Mbit/s.",
        "Calibration: pe0.cnic0.read -5.0%, pe0.cnic1.read -5.0%, pe0.cnic2.read -5.0% and 2 more links beyond the "
        "tolerance of 2.0%.",
    ]


def test_the_ledger_is_judged_system_by_system() -> None:
    result = Result(systems=[Run(system="basic"), Run(system="dualpath")])
    reasons = invalid_reasons(result, [entry(0.5, system="dualpath"), entry(0.0)], LIMITS)
    assert [r.split(":")[0] for r in reasons] == ["dualpath"]


@pytest.mark.parametrize(
    ("run", "rounds", "sentence"),
    [
        (Run(wrong_tokens=["agent0 turn 1: token 3 is 5."]), 0, "1 rounds emitted wrong tokens; the first: agent0"),
        (Run(outcomes=[outcome(error="Timeout", error_detail="st0: late")]), 1, "agent0 turn 1: Timeout (st0: late)"),
        (Run(outcomes=[outcome()], tokens_verified=3), 2, "1 of 2 rounds were completed"),
        (Run(outcomes=[outcome()], tokens_verified=1), 1, "2 tokens were never compared"),
    ],
)
def test_what_makes_a_run_fail(run: Run, rounds: int, sentence: str) -> None:
    reasons = failure_reasons([run], rounds)
    assert len(reasons) == 1 and sentence in reasons[0]


@pytest.mark.parametrize(
    ("text", "holds", "measured"),
    [
        ("ratio(a.x, b.x) >= 1.8", True, 2.0),
        ("ratio(a.x, b.x) > 2", False, 2.0),
        ("a.x > b.x > b.zero", True, 4.0),
        ("a.x > b.x < b.zero", False, 4.0),
        ("min(a.x, b.x) + 1 == 3 and not b.zero > 0", True, 3.0),
        ("a.x - 2 * b.x / -1 != 8 or abs(-3) <= 3", True, 8.0),
        ("dual_path_rr.t.mean < max(a.x, 1)", True, 1.5),
    ],
)
def test_expressions(text: str, holds: bool, measured: float) -> None:
    result = evaluate(text, NUMBERS)
    assert (result.holds, result.measured) == (holds, measured)


def test_a_ratio_to_nothing_does_not_hold() -> None:
    result = evaluate("ratio(a.x, b.zero) >= 1", NUMBERS)
    assert not result.holds and math.isnan(result.measured)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true') > 0", "a.x", "a.x >", "a.x > 'b'", "[a.x] > 0", "a.x ** 9 > 1",
        "(lambda: 1)() > 0",
        "a.x > 1 if a.x else 0", "eval(a.x) > 0", "max() > 0", "ratio(a.x) > 0", "max(a.x, key=abs) > 0", "a.x is b.x",
        "a['x'] > 0", "f'{a.x}' > 0", "(y := 1) > 0", "True > 0", "a.x > 1j", "min(*a) > 0", "(" * 400, "1" * 2000,
    ],
)  # fmt: skip
def test_nothing_but_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises(ConfigError, match="expectation"):
        check_expression(text)
    with pytest.raises(ConfigError):
        evaluate(text, NUMBERS)


def test_claims_about_systems_that_did_not_run_are_left_out() -> None:
    run = Run(outcomes=[outcome()], samples=[sample(0, pe0=0), sample(10, pe0=100)], tokens_verified=3)
    metrics = [system_metrics(run, kv_bytes_per_token=1, nodes=("pe0",), rates=RATES)]
    verdicts = judge(
        [
            Claim(name="jct", metric="basic.jct_s <= 10", text="fast"),
            Claim(name="use", metric="basic.snic_utilisation.pe0.run > 0.5"),
            Claim(name="gain", metric="ratio(basic.jct_s, dualpath.jct_s) > 1"),
        ],
        metrics,
    )
    assert [(v.name, v.holds, v.text) for v in verdicts] == [("jct", True, "fast"), ("use", False, "")]
    assert flatten(metrics)["basic.ttft_s.p99"] == 5.0
    with pytest.raises(ConfigError, match=r"no metric 'basic.jct'"):
        judge([Claim(name="x", metric="basic.jct > 1")], metrics)
