"""The three LLMs of the paper as numbers: KV bytes, prefill FLOPs, attention FLOPs (paper section 3, Table 1, A.2).

Pure arithmetic on paper units: tokens, bytes, FLOPs. Nothing here knows of scales or of time.

Invariants: ``attention_flops`` is additive over chunks, ``attention_flops(c, a + b) == attention_flops(c, a) +
attention_flops(c + a, b)``, so chunked prefill costs what the whole costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from testbed.errors import ConfigError

GIGA = 10**9
PETA = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One LLM.

    KV bytes are per token *and layer*. Attention FLOPs of one new token that sees L tokens are, per layer,
    ``2 * min(L, attention_top_k) * attention_heads * (attention_qk_dim + attention_v_dim)`` for the main attention
    plus ``2 * L * indexer_heads * indexer_dim`` for the sparse-attention indexer (0 without one).
    """

    name: str  # "ds-660b": key in configs
    title: str  # "DS 660B": as the paper's figures call it
    layers: int
    vocab_size: int
    attention_kv_bytes_per_token_layer: int
    indexer_bytes_per_token_layer: int  # key cache of the indexer; 0 for dense attention
    indexer_cached: bool = False  # Table 1 leaves the indexer's key cache out; True counts it
    linear_flops_per_token: int  # 2 x active parameters
    attention_heads: int
    attention_qk_dim: int  # MLA in absorbed form: kv_lora + rope
    attention_v_dim: int  # MLA in absorbed form: kv_lora
    attention_top_k: int | None  # main attention looks at no more tokens than this; None: dense
    indexer_heads: int
    indexer_dim: int
    prefill_nodes: int  # the paper's default P of this model's experiments (A.2)
    decode_nodes: int  # the paper's default D
    hidden_dim: int = 0
    routed_experts: int = 0  # 0: no experts
    experts_per_token: int = 0
    expert_dim: int = 0
    dense_layers: int = 0  # the first layers have no experts

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.routed_experts else 0

    @property
    def expert_share(self) -> float:
        """Share of the linear FLOPs that is the routed experts'; the shared ones are computed where the token is."""
        weights = self.expert_layers * self.experts_per_token * 3 * self.hidden_dim * self.expert_dim
        return 2 * weights / self.linear_flops_per_token

    def exchange_bytes(self, *, combine: bool) -> int:
        """Bytes of one token's copies for all its experts in one layer: FP8 there (dispatch), BF16 back (combine)."""
        return self.hidden_dim * self.experts_per_token * (2 if combine else 1)

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of one token's KV in one layer (with the indexer's keys if ``indexer_cached``)."""
        extra = self.indexer_bytes_per_token_layer if self.indexer_cached else 0
        return self.attention_kv_bytes_per_token_layer + extra

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV over all layers (b_kv): 40,016 for DS 660B, 262,144 for Qwen 32B."""
        return self.kv_bytes_per_token_layer * self.layers

    def layer_block_bytes(self, block_tokens: int) -> int:
        """Size of a Layer Block [1, block_tokens, bytes] (A.5)."""
        return self.kv_bytes_per_token_layer * block_tokens

    def full_block_bytes(self, block_tokens: int) -> int:
        """Size of a Full Block [layers, block_tokens, bytes] (A.5)."""
        return self.kv_bytes_per_token * block_tokens

    def with_indexer(self) -> ModelSpec:
        """The same model with the indexer's key cache stored and moved (DS 660B: 48,068 B per token)."""
        return replace(self, indexer_cached=True)

    def attention_flops_per_token(self, context_tokens: int) -> int:
        """Attention FLOPs, all layers, of one new token that sees ``context_tokens`` tokens."""
        return self.attention_flops(context_tokens - 1, 1) if context_tokens > 0 else 0

    def flops_per_new_token(self, context_tokens: int) -> int:
        """Prefill FLOPs of one new token at a context of ``context_tokens`` (section 3: f(L))."""
        return self.linear_flops_per_token + self.attention_flops_per_token(context_tokens)

    def attention_flops(self, cached_tokens: int, new_tokens: int) -> int:
        """Theoretical attention FLOPs, all layers, of a request (cached, bsz) of a prefill batch (section 6.2).

        New token i (1-based) sees ``cached_tokens + i`` tokens. Exact integer.
        """
        seen = _sum_of_contexts(cached_tokens, new_tokens)
        cap = self.attention_top_k
        attended = seen if cap is None else _sum_capped(cached_tokens, new_tokens, cap)
        main = attended * self.attention_heads * (self.attention_qk_dim + self.attention_v_dim)
        return 2 * self.layers * (main + seen * self.indexer_heads * self.indexer_dim)

    def prefill_flops(self, cached_tokens: int, new_tokens: int) -> int:
        """All prefill FLOPs of a request with ``cached_tokens`` hits and ``new_tokens`` to compute."""
        return self.linear_flops_per_token * new_tokens + self.attention_flops(cached_tokens, new_tokens)

    def cache_compute_ratio(self, context_tokens: int, append_tokens: int = 429) -> float:
        """GB of KV to load per PFLOP of prefill (Table 1): L * b_kv / (append * f(L))."""
        loaded_gb = context_tokens * self.kv_bytes_per_token / GIGA
        return loaded_gb / (append_tokens * self.flops_per_new_token(context_tokens) / PETA)


def _sum_of_contexts(cached: int, new: int) -> int:
    """Sum of cached + i for i in 1..new."""
    return new * cached + new * (new + 1) // 2


def _sum_capped(cached: int, new: int, cap: int) -> int:
    """Sum of min(cap, cached + i) for i in 1..new."""
    below = min(max(cap - cached, 0), new)
    return _sum_of_contexts(cached, below) + (new - below) * cap


DS_660B = ModelSpec(
    name="ds-660b",
    title="DS 660B",
    layers=61,
    vocab_size=129_280,
    attention_kv_bytes_per_token_layer=656,  # 512 B FP8 latent + 4 FP32 scales + 64 BF16 RoPE values
    indexer_bytes_per_token_layer=132,  # 128 FP8 values + one FP32 scale
    linear_flops_per_token=74 * GIGA,  # 2 x 37 B active parameters
    attention_heads=128,
    attention_qk_dim=576,
    attention_v_dim=512,
    attention_top_k=2048,
    indexer_heads=64,
    indexer_dim=128,
    prefill_nodes=2,
    decode_nodes=4,
    hidden_dim=7168,
    routed_experts=256,
    experts_per_token=8,
    expert_dim=2048,
    dense_layers=3,
)
"""DeepSeek-V3.2, served 2P4D in the paper."""

DS_27B = ModelSpec(
    name="ds-27b",
    title="DS 27B",
    layers=30,
    vocab_size=129_280,  # UNKNOWN; assumed to share the tokenizer of V3.2
    # kv_lora and rope are UNKNOWN. Assumed 512 and 64 as in V3.2: then the published dimensions (hidden 2560,
    # 72 + 2 experts of 1536, 32 heads) add up to 27.2 B parameters, which is the model's name.
    attention_kv_bytes_per_token_layer=656,
    indexer_bytes_per_token_layer=68,  # 64 FP8 values + one FP32 scale, by analogy with V3.2
    # UNKNOWN; from the published dimensions: 29 x 8 active experts (2.74 B) + 1 dense layer (0.09 B) + attention
    # (0.96 B) + indexer (0.16 B) = 3.95 B active parameters, twice.
    linear_flops_per_token=7_900_000_000,
    attention_heads=32,
    attention_qk_dim=576,
    attention_v_dim=512,
    attention_top_k=1024,
    indexer_heads=32,
    indexer_dim=64,
    prefill_nodes=1,
    decode_nodes=1,
    hidden_dim=2560,
    routed_experts=72,
    experts_per_token=6,
    expert_dim=1536,
    dense_layers=1,
)
"""DeepSeek's internal 27B model, served 1P1D in the paper. Three fields are assumptions, marked in the source."""

QWEN_32B = ModelSpec(
    name="qwen-32b",
    title="Qwen 32B",
    layers=64,
    vocab_size=152_064,
    attention_kv_bytes_per_token_layer=2 * 8 * 128 * 2,  # K and V, 8 KV heads of 128, FP16
    indexer_bytes_per_token_layer=0,
    linear_flops_per_token=65 * GIGA,
    attention_heads=40,
    attention_qk_dim=128,
    attention_v_dim=128,
    attention_top_k=None,
    indexer_heads=0,
    indexer_dim=0,
    prefill_nodes=1,
    decode_nodes=2,
)
"""Qwen2.5-32B, served 1P2D in the paper."""

MODELS: Mapping[str, ModelSpec] = MappingProxyType({m.name: m for m in (DS_660B, DS_27B, QWEN_32B)})


def model_named(name: str) -> ModelSpec:
    """Look a model up by its key.

    Raises:
        ConfigError: no such model.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}.")
    return MODELS[name]
