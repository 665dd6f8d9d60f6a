"""The scales: exact ties, preserved ratios, round trips, impossible scales."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from testbed.errors import ConfigError
from testbed.models.compute import gpu_for
from testbed.models.hardware import PAPER_HARDWARE
from testbed.models.model import DS_660B, MODELS, QWEN_32B, ModelSpec
from testbed.models.scale import FittedScale, Scale
from testbed.models.scale_report import describe
from testbed.units import transfer_time_ns

EXAMPLE = Scale(bandwidth_scale=4000, time_scale=24.4)
LAPTOP = Scale(bandwidth_scale=2000, time_scale=0.05, length_scale=16, agents_scale=32, gpus_scale=4)


@st.composite
def fitted(draw: st.DrawFn) -> FittedScale:
    scale = Scale(
        bandwidth_scale=draw(st.floats(1, 1e5)),
        time_scale=draw(st.floats(0.01, 100)),
        length_scale=draw(st.sampled_from([1, 2, 4, 8, 16, 32])),
        agents_scale=draw(st.integers(1, 64)),
        gpus_scale=draw(st.sampled_from([1, 2, 4, 8])),
    )
    model = draw(st.sampled_from(list(MODELS.values())))
    try:
        return scale.fit(model)
    except ConfigError:
        assume(False)
        raise


def test_the_example_of_the_architecture() -> None:
    fit = EXAMPLE.fit(DS_660B)
    assert fit.kv_bytes_per_token_layer == 4
    assert fit.byte_scale == 164
    assert float(fit.time_scale) == pytest.approx(24.39, abs=0.01)
    assert fit.emulated_rate_bps(PAPER_HARDWARE.snic_rate_bps) == 100_000_000
    assert abs(fit.rounding_error) < 0.001
    assert (fit.layer_block_bytes(64), fit.full_block_bytes(64)) == (256, 256 * 61)


def test_identity_scale_is_the_paper() -> None:
    fit = Scale().fit(QWEN_32B)
    assert fit.kv_bytes_per_token == QWEN_32B.kv_bytes_per_token
    assert fit.time_scale == fit.byte_scale == fit.bandwidth_scale == 1
    assert fit.emulated_hardware(PAPER_HARDWARE) == PAPER_HARDWARE
    assert all(row.preserved or row.paper == row.emulated for row in describe(fit, PAPER_HARDWARE, gpu_for(QWEN_32B))
               if "latency" not in row.quantity)  # fmt: skip


@given(fit=fitted())
def test_the_three_scales_are_tied_exactly_and_bytes_are_words(fit: FittedScale) -> None:
    assert fit.bandwidth_scale == fit.byte_scale * fit.time_scale
    assert fit.kv_bytes_per_token_layer % 4 == 0 and fit.kv_bytes_per_token_layer >= 4
    carried = fit.model.kv_bytes_per_token_layer * fit.length_scale * fit.agents_scale
    assert fit.byte_scale * fit.kv_bytes_per_token_layer == carried
    assert abs(fit.rounding_error) <= 1.0


@given(fit=fitted(), tokens=st.integers(1, 70_000))
def test_load_time_is_that_of_the_group_times_the_time_scale(fit: FittedScale, tokens: int) -> None:
    emulated = Fraction(tokens * fit.kv_bytes_per_token * 8) * fit.bandwidth_scale / PAPER_HARDWARE.snic_rate_bps
    paper_bytes = tokens * fit.length_scale * fit.agents_scale * fit.model.kv_bytes_per_token
    assert emulated == Fraction(paper_bytes * 8, PAPER_HARDWARE.snic_rate_bps) * fit.time_scale


@given(fit=fitted(), paper_s=st.floats(0.001, 1e5))
def test_times_and_bytes_come_back(fit: FittedScale, paper_s: float) -> None:
    assert fit.to_paper_seconds(fit.emulated_duration_ns(paper_s)) == pytest.approx(paper_s, rel=1e-3)
    size = int(paper_s * 1e9)
    assert fit.to_paper_bytes(fit.emulated_bytes(size)) == pytest.approx(size, rel=1e-6, abs=float(fit.byte_scale))
    assert fit.to_paper_arrival_rate(fit.emulated_arrival_rate(0.4)) == pytest.approx(0.4)


@given(fit=fitted())
def test_the_ratios_that_must_hold_are_reported_as_held(fit: FittedScale) -> None:
    rows = {row.quantity: row for row in describe(fit, PAPER_HARDWARE, gpu_for(fit.model))}
    for quantity in ("s/g", "P:D (default)", "layers", "blocks per average request", "hit rate"):
        assert rows[quantity].preserved, rows[quantity]
    # below some 15 appended tokens rounding to whole tokens moves load : compute, which the row then says
    if fit.length_scale <= 16:
        assert rows["load : compute"].preserved, rows["load : compute"]


def test_load_to_compute_of_the_laptop_scale() -> None:
    fit = LAPTOP.fit(DS_660B)
    gpu = gpu_for(DS_660B)
    compute = fit.compute_model(replace(gpu, prefill_base_s=0.0))
    small = fit.emulated_hardware(PAPER_HARDWARE)
    load = transfer_time_ns(2045 * fit.kv_bytes_per_token, small.snic_rate_bps)
    ratio = load / (compute.prefill_time_ns(2045, 27) / small.gpus_per_node)
    assert ratio == pytest.approx(1.551, rel=0.02)
    assert (small.gpus_per_node, small.cnic_rate_bps, small.snic_rate_bps) == (2, 800_000_000, 200_000_000)


def test_lengths_and_thresholds() -> None:
    fit = LAPTOP.fit(DS_660B)
    assert [fit.emulated_length(n) for n in (0, 1, 8, 24, 429, 32_721)] == [0, 1, 1, 2, 27, 2045]
    assert fit.emulated_block_tokens(64) == 4
    assert fit.emulated_agents(1024) == 32
    assert fit.emulated_load_tokens(3_748_500) == round(3_748_500 / 512)
    assert fit.emulated_load_tokens(800_000, per_gpu=True) == round(800_000 * 4 / 512)
    assert fit.to_paper_tpot(fit.emulated_duration_ns(0.03 * 16)) == pytest.approx(0.03, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scale(bandwidth_scale=0), "bandwidth_scale"),
        (lambda: Scale(time_scale=-1.0), "time_scale"),
        (lambda: Scale(time_scale=float("nan")), "time_scale"),
        (lambda: Scale(length_scale=0), "length_scale"),
        (lambda: Scale(agents_scale=0), "agents_scale"),
        (lambda: Scale(bandwidth_scale=4000, time_scale=1).fit(DS_660B), "below the 4 B minimum"),
        (lambda: Scale(length_scale=48).fit(DS_660B).emulated_block_tokens(64), "does not divide a block"),
        (lambda: Scale(agents_scale=48).fit(DS_660B).emulated_agents(64), "lock-step groups of 48"),
        (lambda: Scale(gpus_scale=3).fit(DS_660B).emulated_hardware(PAPER_HARDWARE), "does not divide the 8 GPUs"),
    ],
)
def test_impossible_scales_are_config_errors(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("model", list(MODELS.values()), ids=list(MODELS))
def test_advice_of_the_minimum_is_right(model: ModelSpec) -> None:
    with pytest.raises(ConfigError) as caught:
        Scale(bandwidth_scale=1e6, time_scale=1).fit(model)
    factor = float(str(caught.value).split("-fold")[0].split()[-1])
    assert Scale(bandwidth_scale=1e6, time_scale=factor).fit(model).kv_bytes_per_token_layer == 4
