"""The analysis library: golden values of the paper and of its reading, and what holds for every cluster."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from testbed.analysis import bottleneck as bn
from testbed.analysis.bottleneck import Resource
from testbed.analysis.ratio import DEEPSEEK_V3, RATIO_MODELS, TABLE_CONTEXTS, AttentionLayers, of_spec, ratio_model
from testbed.analysis.region_plot import region_figure
from testbed.analysis.workingset import GB, PAPER_POINTS, implied_bytes_per_token, stretched, working_set_bytes
from testbed.cli.main import app
from testbed.errors import ConfigError
from testbed.models.model import DS_660B, MODELS

F = Fraction
PAPER = bn.setting(gpus=8, s=F(1), cnic_bytes_per_s=F(50 * GB), memory_bytes_per_s=F(500 * GB))

settings = st.builds(
    lambda gpus, share, memory: bn.Setting(gpus=gpus, s=share * gpus, memory_ratio=memory),
    st.integers(1, 32),
    st.fractions(F(1, 64), 1, max_denominator=200),
    st.fractions(F(1, 4), 60, max_denominator=100),
)
ratios = st.fractions(F(1, 200), 200, max_denominator=200)


# --- section 4.2 ---------------------------------------------------------------------------------------------------


def test_the_papers_interval() -> None:
    interval = bn.pd_interval(PAPER)
    assert (interval.lower, interval.upper) == (F(1, 7), F(7, 2))
    assert interval.uppers == {
        Resource.DE_CNIC_READ: 6,
        Resource.DE_CNIC_WRITE: F(7, 2),
        Resource.DE_DRAM: F(7, 2),
    }
    assert interval.lower_resource is Resource.PE_CNIC_WRITE
    assert interval.upper_resources == (Resource.DE_CNIC_WRITE, Resource.DE_DRAM)
    assert F(1, 7) in interval and F(1, 8) not in interval and F(4) not in interval


def test_uses_at_2p4d_by_hand() -> None:
    assert bn.uses(PAPER, bn.pd_ratio(2, 4)) == {
        Resource.SNIC: 1,
        Resource.PE_CNIC_READ: F(2, 8),
        Resource.PE_CNIC_WRITE: F(1, 8) * 3,
        Resource.DE_CNIC_READ: F(1, 8) * F(5, 2),
        Resource.DE_CNIC_WRITE: F(1, 8) * 2,
        Resource.PE_DRAM: F(100, 500),
        Resource.DE_DRAM: F(4 * 50, 500),
    }


@given(settings, st.integers(1, 40), st.integers(1, 40))
def test_uses_are_sums_over_pairs(at: bn.Setting, p: int, d: int) -> None:
    """The closed forms against T_p and T_c summed over the partners of one GPU, B = 1 (section 4.2)."""
    g = at.gpus
    t_p, t_c = at.s / (d * g * g), at.s / (p * g * g)
    pd = bn.pd_ratio(p, d)
    assert bn.pe_cnic_read_use(at, pd) == 2 * t_p * d * g
    assert bn.pe_cnic_write_use(at, pd) == (t_p + t_c) * d * g
    assert bn.de_cnic_read_use(at, pd) == (t_p + 2 * t_c) * p * g
    assert bn.de_cnic_write_use(at, pd) == (2 * t_p + t_c) * p * g


@given(settings)
def test_each_end_of_the_interval_is_where_its_resource_is_just_full(at: bn.Setting) -> None:
    interval = bn.pd_interval(at)
    if interval.lower is not None:
        assert bn.pe_cnic_write_use(at, interval.lower) == 1
    for resource, bound in interval.uppers.items():
        assert bn.USES[resource](at, bound) == 1


@given(settings, ratios)
def test_storage_is_the_limit_exactly_inside(at: bn.Setting, pd: Fraction) -> None:
    inside = pd in bn.pd_interval(at)
    assert inside == (max(bn.uses(at, pd).values()) == 1) == (Resource.SNIC in bn.binding(at, pd))
    assert inside == (bn.storage_share(at, pd) == 1)


@given(settings)
def test_the_cnics_leave_an_interval_up_to_0382(at: bn.Setting) -> None:
    """x^2 - 3x + 1 >= 0 for x = s/g, if memory is no limit; equation 1 (s <= g/2) never decides."""
    rich = replace(at, memory_ratio=F(10**6))
    interval = bn.pd_interval(rich)
    x = at.share
    assert interval.empty == (x * x - 3 * x + 1 < 0)
    if not interval.empty:
        assert all(interval.always.values()) and x <= F(1, 2)
        assert (Resource.DE_CNIC_WRITE in interval.upper_resources) == (x <= F(1, 3))


@given(settings)
def test_equation_1_concludes_half_of_what_the_paper_does(at: bn.Setting) -> None:
    assert bn.pd_interval(at).always[Resource.PE_CNIC_READ] == (at.s <= F(at.gpus, 2))


@pytest.mark.parametrize(("p", "d", "bound"), [(2, 4, 3), (1, 1, 2), (1, 2, 3), (2, 1, F(3, 2))])
def test_speedup_bound(p: int, d: int, bound: Fraction) -> None:
    assert bn.speedup_bound(p, d) == bound


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gpus": 0}, "g is 0"),
        ({"s": F(0)}, "s is 0"),
        ({"s": F(9)}, "s is 9"),
        ({"memory_bytes_per_s": F(0)}, "memory bandwidth M"),
        ({"cnic_bytes_per_s": F(-1)}, "CNIC bandwidth B"),
    ],
)
def test_impossible_nodes_are_refused(change: dict[str, object], named: str) -> None:
    node = {"gpus": 8, "s": F(1), "cnic_bytes_per_s": F(50), "memory_bytes_per_s": F(500)}
    with pytest.raises(ConfigError, match=named):
        bn.setting(**{**node, **change})  # type: ignore[arg-type]


def test_the_figure_has_the_bounds_and_the_point() -> None:
    axes = region_figure(PAPER, F(1, 2)).axes[0]
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert len(lines) == 5
    x, y = lines["DE CNIC write (eq. 7)"].get_data()
    at = min(range(len(x)), key=lambda i: abs(x[i] - 0.125))
    assert y[at] == pytest.approx(3.5)
    assert lines["s/g = 1/8, P/D = 1/2"].get_data()[1][0] == 0.5


# --- Table 1 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at_16k", "at_64k", "within"),
    [
        ("qwen-32b", 115.8, 265.4, 0.011),
        ("gpt-oss-120b", 46.7, 95.2, 0.01),
        ("qwen3-235b-a22b", 38.9, 59.8, 0.01),
        ("ds-660b", 12.2, 35.1, 0.07),
        ("deepseek-v3", 4.34, 5.15, 0.12),
    ],
)
def test_table_1(name: str, at_16k: float, at_64k: float, within: float) -> None:
    model = ratio_model(name)
    for context, golden in zip(TABLE_CONTEXTS, (at_16k, at_64k), strict=True):
        ours, paper = model.ratio(context), model.paper_ratio(context)
        assert ours == pytest.approx(golden, rel=0.005)
        assert paper is not None and abs(ours / paper - 1) <= within


def test_the_trace() -> None:
    assert ratio_model("ds-660b").ratio(32_721) == pytest.approx(21.6, abs=0.05)
    assert ratio_model("ds-660b", indexer=True).ratio(32_721) == pytest.approx(25.9, abs=0.05)


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("context", [1, 2_048, 32_721])
def test_the_ratio_is_that_of_the_models_served(spec, context: int) -> None:  # type: ignore[no-untyped-def]
    assert RATIO_MODELS[spec.name].ratio(context, 608) == pytest.approx(spec.cache_compute_ratio(context, 608))


def test_what_would_bring_the_deepseek_models_into_range() -> None:
    """The remark at DeepSeek-V3: 960 instead of 1,088 per head gives the paper's digits for V3, V3.2 and the trace."""
    v3 = replace(DEEPSEEK_V3, attention=(AttentionLayers(layers=61, width=128 * 960),))
    assert [round(v3.ratio(context), 1) for context in TABLE_CONTEXTS] == [4.8, 5.8]
    less = of_spec(replace(DS_660B, attention_v_dim=384))
    assert [round(less.ratio(context)) for context in (16_384, 32_721, 65_536)] == [13, 22, 36]


def test_only_the_papers_own_lengths_have_a_paper_value() -> None:
    model = ratio_model("ds-660b")
    assert model.paper_ratio(32_721) == 22 and model.paper_ratio(16_384) == 13
    assert model.paper_ratio(20_000) is None and model.paper_ratio(16_384, 430) is None
    assert ratio_model("ds-660b", indexer=True).paper_ratio(16_384) is None


# --- the working set -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "low_gb", "high_gb"), [(40_016, 64, 554), (48_068, 77, 666)])
def test_working_sets_of_the_64k_trace(size: int, low_gb: float, high_gb: float) -> None:
    sets = [working_set_bytes(aps, jct_s, 55_958, size) / GB for aps, jct_s, _ in PAPER_POINTS]
    assert [round(each) for each in sets] == [low_gb, high_gb]


@pytest.mark.parametrize(("total", "low", "high"), [(55_958, 43_342, 49_171), (42_607, 56_923, 64_579)])
def test_bytes_per_token_that_the_papers_sets_imply(total: int, low: int, high: int) -> None:
    implied = [implied_bytes_per_token(stated, aps, jct_s, total) for aps, jct_s, stated in PAPER_POINTS]
    assert [round(each) for each in implied] == [low, high]


@given(st.floats(1, 50))
def test_r_and_r_squared(r: float) -> None:
    one, longer = stretched(1, 0.2, 600, 50_000, 40_016), stretched(r, 0.2, 600, 50_000, 40_016)
    assert longer.same_rate_bytes == pytest.approx(r * one.same_rate_bytes)
    assert longer.scaled_rate_bytes == pytest.approx(r**2 * one.scaled_rate_bytes)
    assert longer.test_cost == pytest.approx(longer.test_hours**3)


@pytest.mark.parametrize("r", [0.5, float("nan")])
def test_tool_calls_shorten_nothing(r: float) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        stretched(r, 0.1, 569, 55_958, 40_016)


# --- the commands --------------------------------------------------------------------------------------------------


def _says(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    return result.output


def test_plan_names_interval_and_resources(tmp_path: Path) -> None:
    plot = tmp_path / "region.png"
    said = _says("plan", "--plot", str(plot))
    assert "1/7 <= P/D <= 7/2: below, PE CNIC write binds first, above, DE CNIC write and DE DRAM." in said
    assert "(P+D)/P = 3." in said
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_plan_says_why_there_is_no_interval() -> None:
    assert "PE CNIC write needs P/D >= 3/5, DE DRAM needs P/D <= 1/6" in _says("plan", "--s", "3")
    assert "at s = g no P/D" in _says("plan", "--s", "8")
    assert "PE CNIC read cannot follow" in _says("plan", "--s", "9/2", "--memory-gb-s", "99999")


def test_ratio_prints_paper_beside_ours() -> None:
    row = next(line for line in _says("ratio", "--model", "ds-660b").splitlines() if "32,721" in line)
    assert [cell.strip() for cell in row.split("│")[5:8]] == ["21.6", "22", "-2.0%"]
    assert "25.9" in _says("ratio", "--model", "ds-660b", "--context", "32721", "--indexer")


def test_workingset_prints_both_growths() -> None:
    said = _says("workingset", "--aps", "0.1", "--jct-s", "569", "--r", "1,2")
    row = next(line for line in said.splitlines() if "1,138 s" in line)
    assert [cell.strip() for cell in row.split("│")[5:7]] == ["127", "255"]
    assert "paper states 69 GB" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "--s", "x"], "--s is 'x'"),
        (["plan", "--prefill", "0"], "at least 1"),
        (["plan", "--plot", "region.foo"], "--plot region.foo: Format 'foo'"),
        (["plan", "--plot", "/nowhere/x.png"], "--plot /nowhere/x.png: cannot be written"),
        (["plan", "--g", "32", "--memory-gb-s", "99999", "--confirm"], "at most 10 nodes"),
        (["ratio", "--model", "ds-66b"], "did you mean 'ds-660b'"),
        (["ratio", "--context", "1,a"], "--context is '1,a'"),
        (["ratio", "--append", "0"], "at least 1 token"),
        (["workingset", "--aps", "1,2,3"], "--jct-s has 2 values, but --aps has 3"),
        (["workingset", "--aps", ""], "--aps is empty"),
        (["workingset", "--aps", "-1", "--jct-s", "1"], "aps is -1"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr and result.stderr.count("\n") == 1
