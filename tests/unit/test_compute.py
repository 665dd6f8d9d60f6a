"""Compute times: fits, units, monotonicity, chunking and the scales."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import ConfigError
from testbed.models.compute import ComputeModel, gpu_for
from testbed.models.model import DS_27B, DS_660B, QWEN_32B

PAPER = ComputeModel(model=DS_660B, gpu=gpu_for(DS_660B))
NO_BASE = replace(PAPER, gpu=replace(PAPER.gpu, prefill_base_s=0.0))
batches = st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 3000)), max_size=6)


def test_prefill_is_flops_over_the_effective_rate_plus_the_base() -> None:
    flops = DS_660B.prefill_flops(32_721, 429)
    assert PAPER.prefill_time_ns(32_721, 429) == pytest.approx((0.22 + flops / 0.45e15) * 1e9, rel=1e-6)


def test_prefill_of_a_light_load_is_near_figure_12() -> None:
    assert 0.3e9 < PAPER.prefill_time_ns(25_120, 474) < 0.5e9


@pytest.mark.parametrize(
    ("aps", "tpot_s"),
    [(0.1, 0.0291), (0.2, 0.0311), (0.3, 0.0325), (0.4, 0.0356), (0.5, 0.0426)],
)
def test_decode_step_follows_the_oracle_tpot_of_figure_10(aps: float, tpot_s: float) -> None:
    sequences = aps * 106 * 172 * tpot_s / 32  # Little's law over 32 decode GPUs, 48K trace
    low = PAPER.decode_step_time_ns([25_120] * int(sequences))
    high = PAPER.decode_step_time_ns([25_120] * (int(sequences) + 1))
    assert low * 0.97 <= tpot_s * 1e9 <= high * 1.03


def test_decode_of_a_dense_model_grows_with_the_context() -> None:
    qwen = ComputeModel(model=QWEN_32B, gpu=gpu_for(QWEN_32B))
    assert qwen.decode_step_time_ns([40_000]) > qwen.decode_step_time_ns([10_000])
    sparse = ComputeModel(model=DS_27B, gpu=gpu_for(DS_27B))
    assert sparse.decode_step_time_ns([40_000]) == sparse.decode_step_time_ns([10_000])


def test_empty_batches_take_no_time() -> None:
    assert PAPER.prefill_layer_time_ns([]) == 0
    assert PAPER.prefill_layer_time_ns([(500, 0)]) == 0
    assert PAPER.decode_step_time_ns([]) == 0
    assert PAPER.attention_layer_time_ns([]) == 0


def test_quota_admits_what_the_reference_says() -> None:
    # 300 ms per layer at 0.5 PFLOPS is about 136 K new tokens; per forward, about 2.2 K.
    half = replace(PAPER, gpu=replace(PAPER.gpu, effective_attention_flops=0.5e15))
    requests = 136_000 // 429
    assert half.attention_layer_time_ns([(32_721, 429)] * requests) == pytest.approx(half.quota_ns(), rel=0.02)
    assert half.attention_layer_time_ns([(32_721, 429)] * 5) == pytest.approx(half.quota_ns() / 61, rel=0.05)


@given(batch=batches, extra=st.tuples(st.integers(0, 70_000), st.integers(1, 3000)))
def test_more_work_takes_longer(batch: list[tuple[int, int]], extra: tuple[int, int]) -> None:
    more = [*batch, extra]
    assert PAPER.prefill_layer_time_ns(more) > PAPER.prefill_layer_time_ns(batch)
    assert PAPER.attention_layer_time_ns(more) >= PAPER.attention_layer_time_ns(batch)


@given(batch=batches)
def test_layers_add_up(batch: list[tuple[int, int]]) -> None:
    whole = PAPER.prefill_layer_time_ns(batch, 61)
    assert abs(whole - 61 * PAPER.prefill_layer_time_ns(batch)) <= 61
    assert PAPER.attention_layer_time_ns(batch) <= PAPER.prefill_layer_time_ns(batch)


@given(cached=st.integers(0, 4000), new=st.integers(1, 60), k=st.integers(1, 32), m=st.integers(1, 32))
def test_one_scaled_request_is_a_group_of_paper_requests(cached: int, new: int, k: int, m: int) -> None:
    scaled = replace(PAPER, length_scale=k, agents_scale=m, time_scale=Fraction(1, 10))
    group = [(cached * k, new * k)] * m
    assert scaled.prefill_time_ns(cached, new) == pytest.approx(PAPER.prefill_layer_time_ns(group, 61) / 10, abs=2)
    steps = PAPER.decode_step_time_ns([cached * k] * m) * k / 10
    assert scaled.decode_step_time_ns([cached]) == pytest.approx(steps, rel=1e-6, abs=k)


def test_folded_gpus_share_the_work() -> None:
    folded = replace(NO_BASE, gpus_scale=4)
    assert folded.prefill_time_ns(30_000, 400) == pytest.approx(NO_BASE.prefill_time_ns(30_000, 400) / 4, abs=2)
    four_groups = folded.decode_step_time_ns([30_000] * 8)
    assert four_groups == PAPER.decode_step_time_ns([30_000] * 2)


def test_bad_gpus_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="effective_flops"):
        replace(PAPER.gpu, effective_flops=0.0)
    with pytest.raises(ConfigError, match="negative"):
        replace(PAPER.gpu, decode_base_s=-1.0)
    with pytest.raises(ConfigError, match="no GPU is fitted"):
        gpu_for(replace(DS_660B, name="other"))
