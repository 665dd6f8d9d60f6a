"""The scales that map the paper's cluster onto one that fits a laptop (the paper has no counterpart).

Five scales, of which the first two tie a third:

``bandwidth_scale``  paper rate : emulated rate, for every link and memory
``time_scale``       emulated duration : paper duration; ``byte_scale = bandwidth_scale / time_scale``
``length_scale``     paper tokens that one emulated token stands for; lengths and block_tokens shrink alike
``agents_scale``     paper agents, running in lock-step, that one emulated agent stands for
``gpus_scale``       GPUs (each with its CNIC) of a paper node that one emulated GPU stands for

One emulated token therefore carries the KV of ``length_scale * agents_scale`` paper tokens, divided by ``byte_scale``.
That size must be a multiple of 4 bytes (the word of the KV content function), so ``Scale.fit(model)`` rounds it, and
then recomputes ``byte_scale`` and ``time_scale`` as exact fractions: rounding moves the time scale a little and breaks
no ratio.

Invariants: ``bandwidth_scale == byte_scale * time_scale`` exactly; load time : prefill time, SNIC : CNIC, s/g, P:D,
layers, blocks per request and hit rate are those of the paper for every valid scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from testbed.errors import ConfigError
from testbed.models.compute import ComputeModel, GpuSpec
from testbed.models.hardware import Hardware
from testbed.models.model import ModelSpec
from testbed.protocol.collectives import Collectives, Transport
from testbed.units import NS_PER_S

WORD_BYTES = 4
PAPER_BLOCK_TOKENS = 64
"""Tokens per block in the paper's example; the size used in its experiments is UNKNOWN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scales as a scenario asks for them. All at 1: the paper itself."""

    bandwidth_scale: float = 1
    time_scale: float = 1
    length_scale: int = 1
    agents_scale: int = 1
    gpus_scale: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be a scale.

        Raises:
            ConfigError: a scale that is not positive, or a count that is not a whole number.
        """
        for key in ("bandwidth_scale", "time_scale"):
            value = getattr(self, key)
            if not 0 < value < float("inf"):
                raise ConfigError(f"scale: {key} is {value}, but it must be a positive number.")
        for key in ("length_scale", "agents_scale", "gpus_scale"):
            value = getattr(self, key)
            if value < 1 or value != int(value):
                raise ConfigError(f"scale: {key} is {value}, but it must be a whole number of at least 1.")

    @property
    def byte_scale(self) -> float:
        """Paper bytes : emulated bytes as asked for; ``fit`` makes it exact."""
        return self.bandwidth_scale / self.time_scale

    def fit(self, model: ModelSpec) -> FittedScale:
        """Choose the whole number of bytes per emulated token and layer, and make the other scales exact.

        Raises:
            ConfigError: an emulated token would carry less than one 4-byte word per layer.
        """
        paper_bytes = model.kv_bytes_per_token_layer * self.length_scale * self.agents_scale
        wanted_bytes = paper_bytes / Fraction(self.bandwidth_scale) * Fraction(self.time_scale)
        words = round(wanted_bytes / WORD_BYTES)
        if words < 1:
            raise ConfigError(
                f"scale: {model.title} would have {float(wanted_bytes):.3g} B of KV per emulated token and layer, "
                f"below the {WORD_BYTES} B minimum; raise time_scale, length_scale or agents_scale "
                f"{float(WORD_BYTES / wanted_bytes):.3g}-fold in all, or lower bandwidth_scale."
            )
        byte_scale = Fraction(paper_bytes, words * WORD_BYTES)
        bandwidth_scale = Fraction(self.bandwidth_scale)
        return FittedScale(
            model=model,
            bandwidth_scale=bandwidth_scale,
            byte_scale=byte_scale,
            time_scale=bandwidth_scale / byte_scale,
            length_scale=int(self.length_scale),
            agents_scale=int(self.agents_scale),
            gpus_scale=int(self.gpus_scale),
            kv_bytes_per_token_layer=words * WORD_BYTES,
            rounding_error=float(words * WORD_BYTES / wanted_bytes - 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedScale:
    """Exact scales for one model; made by ``Scale.fit``. Paper values in, emulated values out, and back.

    ``rounding_error`` is the relative change of the bytes per token, hence also of ``time_scale``, against what was
    asked for.
    """

    model: ModelSpec
    bandwidth_scale: Fraction
    byte_scale: Fraction
    time_scale: Fraction
    length_scale: int
    agents_scale: int
    gpus_scale: int
    kv_bytes_per_token_layer: int
    rounding_error: float

    @property
    def kv_bytes_per_token(self) -> int:
        """Emulated KV bytes of one emulated token over all layers."""
        return self.kv_bytes_per_token_layer * self.model.layers

    def layer_block_bytes(self, block_tokens: int) -> int:
        """Emulated size of a Layer Block of ``block_tokens`` emulated tokens."""
        return self.kv_bytes_per_token_layer * block_tokens

    def full_block_bytes(self, block_tokens: int) -> int:
        """Emulated size of a Full Block of ``block_tokens`` emulated tokens."""
        return self.kv_bytes_per_token * block_tokens

    # -- paper to emulated

    def emulated_rate_bps(self, paper_rate_bps: int) -> int:
        """Rate of a node-wide resource (SNIC, DRAM) in the emulated cluster."""
        return round(paper_rate_bps / self.bandwidth_scale)

    def emulated_gpu_rate_bps(self, paper_rate_bps: int) -> int:
        """Rate of a per-GPU resource (CNIC, PCIe): ``gpus_scale`` of them are one in the emulated cluster."""
        return round(paper_rate_bps * self.gpus_scale / self.bandwidth_scale)

    def emulated_bytes(self, paper_bytes: int) -> int:
        """Size of a node-wide memory (KV DRAM) in the emulated cluster. Per GPU: multiply by ``gpus_scale``."""
        return round(paper_bytes / self.byte_scale)

    def emulated_duration_ns(self, paper_s: float) -> int:
        """Emulated nanoseconds for a duration of the paper's world."""
        return round(Fraction(paper_s) * self.time_scale * NS_PER_S)

    def emulated_length(self, paper_tokens: int) -> int:
        """Emulated length of a text of ``paper_tokens`` tokens, rounded to nearest; 0 stays 0, else at least 1."""
        return 0 if paper_tokens <= 0 else max(1, round(Fraction(paper_tokens, self.length_scale)))

    def emulated_load_tokens(self, paper_tokens: int, *, per_gpu: bool = False) -> int:
        """Emulated value of a load threshold that sums tokens over requests: alpha (node), beta (``per_gpu``)."""
        shares = self.gpus_scale if per_gpu else 1
        return max(1, round(Fraction(paper_tokens * shares, self.length_scale * self.agents_scale)))

    def emulated_block_tokens(self, paper_block_tokens: int = PAPER_BLOCK_TOKENS) -> int:
        """Emulated tokens per block.

        Raises:
            ConfigError: ``length_scale`` does not divide the block, so blocks per request would change.
        """
        if paper_block_tokens % self.length_scale:
            raise ConfigError(
                f"scale: length_scale {self.length_scale} does not divide a block of {paper_block_tokens} tokens; "
                f"choose a divisor of {paper_block_tokens}."
            )
        return paper_block_tokens // self.length_scale

    def emulated_agents(self, paper_agents: int) -> int:
        """Number of emulated agents for ``paper_agents``.

        Raises:
            ConfigError: ``agents_scale`` does not divide the number of agents.
        """
        if paper_agents < 1 or paper_agents % self.agents_scale:
            raise ConfigError(
                f"scale: {paper_agents} agents cannot be split into lock-step groups of {self.agents_scale} "
                "(agents_scale); choose a multiple."
            )
        return paper_agents // self.agents_scale

    def emulated_arrival_rate(self, paper_aps: float) -> float:
        """Emulated agent arrivals per emulated second for the paper's APS."""
        return paper_aps / self.agents_scale / float(self.time_scale)

    def emulated_submission_ns(self, paper_s: float) -> int:
        """Emulated cost of submitting one block to or from one emulated GPU (section 5.2).

        It stands for ``agents_scale`` blocks, which the threads of ``gpus_scale`` GPUs submit side by side.
        """
        return round(Fraction(paper_s) * self.agents_scale / self.gpus_scale * self.time_scale * NS_PER_S)

    def compute_model(self, gpu: GpuSpec) -> ComputeModel:
        """Compute times in emulated tokens and emulated nanoseconds."""
        return ComputeModel(
            model=self.model,
            gpu=gpu,
            length_scale=self.length_scale,
            agents_scale=self.agents_scale,
            gpus_scale=self.gpus_scale,
            time_scale=self.time_scale,
        )

    def collectives(self, cost: ComputeModel, transport: Transport, layers: int, cnic_rate_bps: int) -> Collectives:
        """Expert-parallel exchanges in emulated units: a token's bytes shrink as its KV does.

        Raises:
            ConfigError: a model without experts, or parts without layers.
        """
        model = self.model
        if not model.routed_experts:
            raise ConfigError(
                f"collectives: {model.title} has no experts, so its engines exchange nothing; "
                'set collectives.transport = "off" or choose a DeepSeek model.'
            )
        per_token = float(self.length_scale * self.agents_scale / self.byte_scale)
        return Collectives(
            transport=transport,
            layers=layers,
            dense_layers=model.dense_layers,
            top_k=model.experts_per_token,
            dispatch_bytes=model.exchange_bytes(combine=False) * per_token,
            combine_bytes=model.exchange_bytes(combine=True) * per_token,
            prefill_expert_ns=cost.prefill_expert_ns(),
            decode_expert_ns=cost.decode_expert_ns(),
            cnic_rate_bps=cnic_rate_bps,
        )

    def emulated_hardware(self, hardware: Hardware) -> Hardware:
        """The whole node in emulated units.

        Raises:
            ConfigError: ``gpus_scale`` does not divide the GPUs of a node, or a rate falls below 1 bit/s.
        """
        if hardware.gpus_per_node % self.gpus_scale:
            raise ConfigError(
                f"scale: gpus_scale {self.gpus_scale} does not divide the {hardware.gpus_per_node} GPUs of a node."
            )
        return Hardware(
            gpus_per_node=hardware.gpus_per_node // self.gpus_scale,
            cnic_rate_bps=self.emulated_gpu_rate_bps(hardware.cnic_rate_bps),
            snic_rate_bps=self.emulated_rate_bps(hardware.snic_rate_bps),
            pcie_rate_bps=self.emulated_gpu_rate_bps(hardware.pcie_rate_bps),
            dram_rate_bps=self.emulated_rate_bps(hardware.dram_rate_bps),
        )

    # -- emulated back to paper

    def to_paper_seconds(self, emulated_ns: int) -> float:
        """The paper's seconds for an emulated duration. For a time per generated token see ``to_paper_tpot``."""
        return float(emulated_ns / self.time_scale / NS_PER_S)

    def to_paper_tpot(self, emulated_ns: int) -> float:
        """The paper's seconds per token for an emulated time per emulated token (TPOT).

        TTST has one such token in it; the rest of it is a duration.
        """
        return self.to_paper_seconds(emulated_ns) / self.length_scale

    def to_paper_bytes(self, emulated_bytes: int) -> int:
        """The paper's bytes for emulated KV bytes (all agents of a lock-step group together)."""
        return round(emulated_bytes * self.byte_scale)

    def to_paper_rate_bps(self, emulated_rate_bps: float) -> float:
        """The paper's rate for an emulated rate of a node-wide resource."""
        return float(emulated_rate_bps * self.bandwidth_scale)

    def to_paper_length(self, emulated_tokens: int) -> int:
        """The paper's length of a text."""
        return emulated_tokens * self.length_scale

    def to_paper_arrival_rate(self, emulated_aps: float) -> float:
        """The paper's agents per second."""
        return emulated_aps * self.agents_scale * float(self.time_scale)
