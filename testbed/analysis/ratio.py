"""The cache-compute ratio (paper section 3, Table 1): GB of KV to load per PFLOP of prefill.

rho(L) = L * b / (A * f(L)) for a context of L tokens, A appended tokens, b bytes of KV per token and f(L) FLOPs per new
token: twice the active parameters plus attention. Models that only this table knows (no scheduler profile, no GPU fit)
are here, from their public configurations; those that the testbed serves come from ``testbed.models``.

KV is FP8 (Table 1) unless the model says otherwise. A layer with a sliding window keeps a constant amount of KV, so
what has to be loaded per token of context counts only the layers that see all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from testbed.errors import ConfigError
from testbed.models.model import DS_660B, GIGA, MODELS, PETA, ModelSpec

TABLE_APPEND_TOKENS = 429
TABLE_CONTEXTS = (16_384, 65_536)
TRACE_CONTEXT = 32_721
"""Mean context of a turn of the 64K trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayers:
    """Layers that attend alike: 2 * min(L, window) * width FLOPs per new token and layer.

    ``width``: heads x (dimension of a key + of a value), in the form that is computed (MLA: absorbed).
    """

    layers: int
    width: int
    window: int | None = None

    def flops(self, context_tokens: int) -> int:
        """FLOPs of one new token over all these layers."""
        seen = context_tokens if self.window is None else min(context_tokens, self.window)
        return 2 * self.layers * seen * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioModel:
    """What the ratio needs of a model. ``paper``: Table 1's range at 16K and 64K of context; None if not in it."""

    name: str
    title: str
    kv_bytes_per_token: int
    linear_flops_per_token: int
    attention: tuple[AttentionLayers, ...]
    paper: tuple[float, float] | None = None
    paper_on_trace: float | None = None
    remark: str = ""

    def flops_per_new_token(self, context_tokens: int) -> int:
        """f(L): prefill FLOPs of one new token that sees ``context_tokens`` tokens."""
        return self.linear_flops_per_token + sum(group.flops(context_tokens) for group in self.attention)

    def ratio(self, context_tokens: int, append_tokens: int = TABLE_APPEND_TOKENS) -> float:
        """rho(L) in GB per PFLOP.

        Raises:
            ConfigError: no context or nothing appended.
        """
        if context_tokens < 1 or append_tokens < 1:
            raise ConfigError(f"context {context_tokens} and append {append_tokens}: both must be at least 1 token.")
        loaded_gb = context_tokens * self.kv_bytes_per_token / GIGA
        return loaded_gb / (append_tokens * self.flops_per_new_token(context_tokens) / PETA)

    def paper_ratio(self, context_tokens: int, append_tokens: int = TABLE_APPEND_TOKENS) -> float | None:
        """What the paper prints for this length; None where it prints nothing."""
        if append_tokens != TABLE_APPEND_TOKENS:
            return None
        if context_tokens == TRACE_CONTEXT:
            return self.paper_on_trace
        if self.paper is None or context_tokens not in TABLE_CONTEXTS:
            return None
        return self.paper[TABLE_CONTEXTS.index(context_tokens)]


def of_spec(
    spec: ModelSpec, *, paper: tuple[float, float] | None = None, on_trace: float | None = None, remark: str = ""
) -> RatioModel:
    """The ratio's view of a model that the testbed serves."""
    main = AttentionLayers(
        layers=spec.layers,
        width=spec.attention_heads * (spec.attention_qk_dim + spec.attention_v_dim),
        window=spec.attention_top_k,
    )
    indexer = AttentionLayers(layers=spec.layers, width=spec.indexer_heads * spec.indexer_dim)
    return RatioModel(
        name=spec.name,
        title=spec.title,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        linear_flops_per_token=spec.linear_flops_per_token,
        attention=(main, indexer),
        paper=paper,
        paper_on_trace=on_trace,
        remark=remark,
    )


GPT_OSS_120B = RatioModel(
    # github.com/openai/gpt-oss, gpt_oss/torch/model.py: 36 layers, every other one with a window of 128; 64 heads, 8 KV
    # heads, head 64. Model card: 5.1 B active parameters.
    name="gpt-oss-120b",
    title="GPT-OSS-120B",
    kv_bytes_per_token=18 * 2 * 8 * 64,
    linear_flops_per_token=10_200_000_000,
    attention=(
        AttentionLayers(layers=18, width=64 * (64 + 64)),
        AttentionLayers(layers=18, width=64 * (64 + 64), window=128),
    ),
    paper=(47, 95),
    remark="only the 18 layers with full attention load KV per token of context; with all 36 it would be twice as much",
)

QWEN3_235B = RatioModel(
    # huggingface.co/Qwen/Qwen3-235B-A22B, config.json and model card: 94 layers, 64 heads, 4 KV heads, head 128;
    # 22 B active parameters.
    name="qwen3-235b-a22b",
    title="Qwen3-235B-A22B",
    kv_bytes_per_token=94 * 2 * 4 * 128,
    linear_flops_per_token=44 * GIGA,
    attention=(AttentionLayers(layers=94, width=64 * (128 + 128)),),
    paper=(39, 60),
)

DEEPSEEK_V3 = RatioModel(
    # huggingface.co/deepseek-ai/DeepSeek-V3, config.json: 61 layers, 128 heads, kv_lora 512, rope 64; 37 B active
    # parameters. KV as V3.2 stores it: 512 B of FP8 latent, 4 FP32 scales, 64 BF16 RoPE values. Dense, absorbed MLA.
    name="deepseek-v3",
    title="DeepSeek-V3 660B",
    kv_bytes_per_token=61 * 656,
    linear_flops_per_token=74 * GIGA,
    attention=(AttentionLayers(layers=61, width=128 * (576 + 512)),),
    paper=(4.8, 5.8),
    remark=(
        "about 10 % low: the paper's range needs attention of 15.0 instead of 17.0 MFLOP per token of context; with so "
        "much less main attention DS 660B would be 12.6 to 35.9, in range too, but no public reading gives it"
    ),
)

RATIO_MODELS: Mapping[str, RatioModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            of_spec(MODELS["qwen-32b"], paper=(117, 267)),
            GPT_OSS_120B,
            QWEN3_235B,
            of_spec(
                DS_660B,
                paper=(13, 36),
                on_trace=22,
                remark="2 to 6 % low, as DeepSeek-V3 is: the same surplus of main attention, less visible here",
            ),
            DEEPSEEK_V3,
            of_spec(MODELS["ds-27b"], remark="not in Table 1; its KV bytes and active parameters are assumptions"),
        )
    }
)
"""Rows of Table 1 in its order, then the paper's third model."""


def ratio_model(name: str, *, indexer: bool = False) -> RatioModel:
    """A model by name; ``indexer`` counts the key cache of a sparse-attention indexer, which Table 1 leaves out.

    Raises:
        ConfigError: no such model.
    """
    if name not in RATIO_MODELS:
        raise ConfigError(f"unknown model {name!r}; choose from {', '.join(RATIO_MODELS)}.")
    if indexer and name in MODELS and MODELS[name].indexer_bytes_per_token_layer:
        return of_spec(MODELS[name].with_indexer(), remark="with the indexer's key cache, which Table 1 leaves out")
    return RATIO_MODELS[name]
