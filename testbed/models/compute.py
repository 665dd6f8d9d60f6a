"""How long a GPU computes: prefill, attention under the compute quota, decode (paper sections 6.2, 7; A.4).

The paper profiles these on its hardware and does not publish the fits, so every constant of ``GpuSpec`` is a named
parameter whose default says where it comes from. ``ComputeModel`` answers in integer nanoseconds. By default it
speaks the paper's units; with the scales set (see ``testbed.models.scale``) it takes emulated tokens and answers in
emulated time.

Invariants: times are monotone in every token count; an empty batch takes 0 ns; with all scales at 1 the emulated
answer is the paper's answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from testbed.errors import ConfigError
from testbed.models.model import ModelSpec
from testbed.units import NS_PER_S, seconds_to_ns

COMPUTE_QUOTA_S = 0.3
"""The paper's compute quota (section 6.2): predicted attention time of a forward, 300 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """What one GPU does with one model, in paper units: rates in FLOP/s, times in seconds.

    A prefill forward takes ``prefill_base_s`` plus its linear FLOPs over ``effective_flops`` plus its attention FLOPs
    over ``effective_attention_flops``. A decode step takes ``decode_base_s + decode_per_sequence_s * sequences +
    decode_per_context_token_s * tokens in all contexts``.
    """

    effective_flops: float
    effective_attention_flops: float
    prefill_base_s: float
    decode_base_s: float
    decode_per_sequence_s: float
    decode_per_context_token_s: float

    def __post_init__(self) -> None:
        """Refuse a GPU that never finishes.

        Raises:
            ConfigError: a rate that is not positive or a negative time.
        """
        if not (self.effective_flops > 0 and self.effective_attention_flops > 0):
            raise ConfigError("GPU: effective_flops and effective_attention_flops must be positive.")
        decode = (self.decode_base_s, self.decode_per_sequence_s, self.decode_per_context_token_s)
        if min(self.prefill_base_s, *decode) < 0:
            raise ConfigError("GPU: prefill and decode times must not be negative.")


HOPPER: Mapping[str, GpuSpec] = MappingProxyType(
    {
        "ds-660b": GpuSpec(
            # The Oracle of Figure 7 (32K, 4,096 agents) sustains 0.39 PFLOPS per prefill GPU and the plateau of
            # Figure 15 about 0.4, both with the per-forward base inside; 0.45 leaves room for that base.
            effective_flops=0.45e15,
            effective_attention_flops=0.45e15,
            # Figure 3 right (throughput against batch at 30K context, 300 appended) fits base + slope * batch with a
            # base worth 703 new tokens, 0.22 s at this rate. Base + one 429-token request is then 0.35 s; Figure 12
            # has 0.43 s of prefill at low load.
            prefill_base_s=0.22,
            # Oracle TPOT of Figure 10 against the sequences per decode GPU that Little's law gives (48K trace):
            # 26.4 ms + 1.24 ms per sequence, residuals below 3 %. Sparse attention: no context term is visible.
            decode_base_s=0.0264,
            decode_per_sequence_s=0.00124,
            decode_per_context_token_s=0.0,
        ),
        "ds-27b": GpuSpec(
            # Oracle of Figure 7 (32K, 4,096 agents) sustains 0.17 PFLOPS; its narrow matrices reach less than 660B's.
            effective_flops=0.25e15,
            effective_attention_flops=0.25e15,
            prefill_base_s=0.11,  # as 660B, in proportion to the layers (30 of 61)
            # The three 4,096-agent Oracle cells of Figure 7, read as decode-bound with 60 GB of KV HBM per GPU, give
            # 31, 37 and 46 ms at 84, 110 and 160 sequences.
            decode_base_s=0.0146,
            decode_per_sequence_s=0.0002,
            decode_per_context_token_s=0.0,
        ),
        "qwen-32b": GpuSpec(
            effective_flops=0.4e15,  # about 40 % of Hopper's dense BF16 peak; no figure to fit
            effective_attention_flops=0.4e15,
            prefill_base_s=0.01,  # the weights are read once per forward: 33 GB (FP8) at 3.35 TB/s
            decode_base_s=0.0115,  # the same read plus launch overhead
            decode_per_sequence_s=0.0,
            decode_per_context_token_s=262_144 / 3.0e12,  # dense attention reads all KV at about 3 TB/s
        ),
    }
)
"""Default GPU of the paper's testbed (Hopper) per model name."""


def gpu_for(model: ModelSpec) -> GpuSpec:
    """Default ``GpuSpec`` for a model.

    Raises:
        ConfigError: a model that has no fitted GPU.
    """
    if model.name not in HOPPER:
        raise ConfigError(f"no GPU is fitted for model {model.name!r}; give its GpuSpec.")
    return HOPPER[model.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """Compute times of one (emulated) GPU.

    Token counts are emulated lengths: each stands for ``length_scale`` paper tokens of each of ``agents_scale``
    agents that run in lock-step, and one emulated GPU stands for ``gpus_scale`` GPUs of a node that share the work
    evenly. Answers are the paper's durations times ``time_scale``.
    """

    model: ModelSpec
    gpu: GpuSpec
    length_scale: int = 1
    agents_scale: int = 1
    gpus_scale: int = 1
    time_scale: Fraction = Fraction(1)

    @property
    def _requests_per_gpu(self) -> float:
        """Paper requests that one paper GPU sees for each emulated request here."""
        return self.agents_scale / self.gpus_scale

    def _to_ns(self, paper_s: float) -> int:
        return seconds_to_ns(paper_s * float(self.time_scale))

    def _attention_s(self, batch: Sequence[tuple[int, int]]) -> float:
        k = self.length_scale
        flops = sum(self.model.attention_flops(cached * k, new * k) for cached, new in batch)
        return flops * self._requests_per_gpu / self.gpu.effective_attention_flops

    def attention_layer_time_ns(self, batch: Sequence[tuple[int, int]]) -> int:
        """Predicted attention time of *one* layer for a batch of (cached, new) tokens; what the quota measures."""
        return self._to_ns(self._attention_s(batch) / self.model.layers)

    def prefill_layer_time_ns(self, batch: Sequence[tuple[int, int]], layers: int = 1) -> int:
        """Time of ``layers`` consecutive layers of one forward over a batch of (cached, new) tokens."""
        new_tokens = sum(new for _, new in batch) * self.length_scale
        if new_tokens == 0:
            return 0
        linear_s = new_tokens * self.model.linear_flops_per_token * self._requests_per_gpu / self.gpu.effective_flops
        whole_s = self.gpu.prefill_base_s + linear_s + self._attention_s(batch)
        return self._to_ns(whole_s * layers / self.model.layers)

    def prefill_time_ns(self, cached_tokens: int, new_tokens: int) -> int:
        """Time of a whole forward over a single request."""
        return self.prefill_layer_time_ns([(cached_tokens, new_tokens)], self.model.layers)

    def decode_step_time_ns(self, context_tokens: Sequence[int]) -> int:
        """Time in which every sequence of the batch emits one emulated token; ``context_tokens`` one per sequence.

        One emulated token stands for ``length_scale`` steps. The base of a step does not grow with ``agents_scale``;
        its per-sequence and per-context parts do, because that many sequences really are in the batch.
        """
        if not context_tokens:
            return 0
        contexts = sum(context_tokens) * self.length_scale
        step_s = self.gpu.decode_base_s + self._requests_per_gpu * (
            self.gpu.decode_per_sequence_s * len(context_tokens) + self.gpu.decode_per_context_token_s * contexts
        )
        return self._to_ns(step_s * self.length_scale)

    def prefill_expert_ns(self) -> float:
        """Part of a forward that is the routed experts', per emulated token and layer with experts."""
        flops = self.model.linear_flops_per_token * self.model.expert_share * self.length_scale
        return self._per_expert_layer_ns(flops * self._requests_per_gpu / self.gpu.effective_flops)

    def decode_expert_ns(self) -> float:
        """Part of a decode step that is the routed experts', per layer with experts: they are bound by reading their
        weights, so it is a share of the base, however many sequences there are."""
        return self._per_expert_layer_ns(self.gpu.decode_base_s * self.model.expert_share * self.length_scale)

    def _per_expert_layer_ns(self, paper_s: float) -> float:
        return paper_s * float(self.time_scale) * NS_PER_S / self.model.expert_layers

    def quota_ns(self, quota_s: float = COMPUTE_QUOTA_S) -> int:
        """The compute quota in emulated time, to compare with ``attention_layer_time_ns``.

        Whether the paper means 300 ms per layer or per forward is open; for "per forward" divide by ``model.layers``.
        """
        return self._to_ns(quota_s)
