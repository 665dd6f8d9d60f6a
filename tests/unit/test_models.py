"""Golden values of the three models: Table 1, section 1 of the reference, A.5 block sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import ConfigError
from testbed.models.compute import HOPPER, gpu_for
from testbed.models.hardware import (
    PAPER_HARDWARE,
    Hardware,
    alpha_tokens,
    beta_tokens,
    kv_dram_bytes_per_node,
    kv_hbm_bytes_per_gpu,
)
from testbed.models.model import DS_27B, DS_660B, MODELS, QWEN_32B, ModelSpec, model_named

K16, TRACE, K64 = 16_384, 32_721, 65_536
models = st.sampled_from(list(MODELS.values()))


@pytest.mark.parametrize(("context", "gflop"), [(K16, 125.2), (TRACE, 141.5), (K64, 174.3)])
def test_flops_of_a_new_token_of_v32(context: int, gflop: float) -> None:
    assert DS_660B.flops_per_new_token(context) / 1e9 == pytest.approx(gflop, abs=0.05)


@pytest.mark.parametrize(
    ("model", "context", "ratio"),
    [
        (DS_660B, K16, 12.2),
        (DS_660B, TRACE, 21.6),
        (DS_660B, K64, 35.1),
        (DS_660B.with_indexer(), TRACE, 25.9),
        (QWEN_32B, K16, 115.8),
        (QWEN_32B, K64, 265.4),
    ],
)
def test_cache_compute_ratio_reproduces_table_1(model: ModelSpec, context: int, ratio: float) -> None:
    assert model.cache_compute_ratio(context) == pytest.approx(ratio, abs=0.05)


def test_table_1_ranges_hold() -> None:
    assert 12.0 <= DS_660B.cache_compute_ratio(K16) <= 13 and 35 <= DS_660B.cache_compute_ratio(K64) <= 36
    assert 115 <= QWEN_32B.cache_compute_ratio(K16) <= 117 and 265 <= QWEN_32B.cache_compute_ratio(K64) <= 267


def test_kv_bytes_and_block_sizes() -> None:
    assert DS_660B.kv_bytes_per_token == 40_016
    assert DS_660B.with_indexer().kv_bytes_per_token == 48_068
    assert QWEN_32B.kv_bytes_per_token == 262_144
    assert (DS_660B.layer_block_bytes(64), DS_660B.full_block_bytes(64)) == (41_984, 2_561_024)
    assert DS_660B.with_indexer().layer_block_bytes(64) == 50_432
    assert DS_660B.with_indexer().full_block_bytes(64) == 3_076_352
    assert (QWEN_32B.layer_block_bytes(64), QWEN_32B.full_block_bytes(64)) == (256 * 1024, 16 * 1024 * 1024)
    assert DS_27B.kv_bytes_per_token == 30 * 656


def test_attention_is_capped_for_the_main_part_only() -> None:
    per_context = 61 * 2 * 64 * 128
    assert DS_660B.attention_flops_per_token(5000) - DS_660B.attention_flops_per_token(4000) == 1000 * per_context
    dense = 61 * 2 * (576 + 512) * 128
    assert DS_660B.attention_flops_per_token(1000) == 1000 * (dense + per_context)
    assert DS_660B.attention_flops_per_token(0) == 0


@given(model=models, cached=st.integers(0, 5000), new=st.integers(0, 40))
def test_attention_flops_is_the_sum_over_the_new_tokens(model: ModelSpec, cached: int, new: int) -> None:
    total = sum(model.attention_flops_per_token(cached + i) for i in range(1, new + 1))
    assert model.attention_flops(cached, new) == total


@given(model=models, cached=st.integers(0, 70_000), a=st.integers(0, 5000), b=st.integers(0, 5000))
def test_chunked_prefill_costs_what_the_whole_costs(model: ModelSpec, cached: int, a: int, b: int) -> None:
    assert model.prefill_flops(cached, a + b) == model.prefill_flops(cached, a) + model.prefill_flops(cached + a, b)


def test_unknown_model_is_a_config_error_that_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="ds-660b, ds-27b, qwen-32b"):
        model_named("gpt-2")
    assert model_named("ds-27b") is DS_27B


def test_scheduler_thresholds() -> None:
    assert alpha_tokens(DS_660B) == pytest.approx(3.7e6, rel=0.02)
    assert alpha_tokens(DS_660B.with_indexer()) == pytest.approx(3.1e6, rel=0.02)
    assert alpha_tokens(QWEN_32B) == pytest.approx(0.57e6, rel=0.02)
    assert 0.8e6 <= beta_tokens(DS_660B, gpu_for(DS_660B)) <= 1.3e6


def test_kv_memory() -> None:
    assert kv_dram_bytes_per_node(DS_660B) // DS_660B.kv_bytes_per_token == pytest.approx(2.0e6, rel=0.01)
    assert kv_dram_bytes_per_node(QWEN_32B) // QWEN_32B.kv_bytes_per_token == pytest.approx(1.2e6, rel=0.02)
    assert set(MODELS) == set(HOPPER)
    for model in MODELS.values():
        assert all(size > 0 for size in kv_hbm_bytes_per_gpu(model))


def test_hardware_refuses_a_node_without_parts() -> None:
    assert PAPER_HARDWARE.s == 1.0
    with pytest.raises(ConfigError, match="snic_rate_bps"):
        Hardware(snic_rate_bps=0)
