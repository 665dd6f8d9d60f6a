"""Expert-parallel collectives of a group (paper sections 5 and 8.5): what is exchanged, in which parts, at what cost.

With DP attention and expert parallelism the engines of a group meet twice in every layer that has experts: each sends
its tokens to the GPUs of the experts chosen for them (*dispatch*, FP8), and gets them back (*combine*, BF16). A forward
or a decode step is cut into parts of ``layers`` layers; the exchanges of a part's layers travel as one.

* ``rdma``: every pair of engines over the NIC, engines of a node too, as DeepEP's kernels for low latency do: 1/E of a
  token's copies goes to each of the E engines, the own one included.
* ``rails``: one copy of a token per other node, to the engine of the same index there; inside a node NVLink takes over,
  which is not emulated. A token goes to at most four nodes.

Tokens, bytes and times are emulated ones. Invariant: what a token's dispatch brings, its combine takes the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from testbed.errors import ConfigError
from testbed.ids import gpu_index, node_of
from testbed.units import NS_PER_S

Transport = Literal["rdma", "rails"]

NODES_PER_TOKEN = 4
"""A token's experts are chosen from at most so many nodes (group-limited routing)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Layers ``[begin, end)`` of a round; ``step``: number of the layer step they belong to, ``ends_step``: its end."""

    step: int
    begin: int
    end: int
    ends_step: bool

    @property
    def layers(self) -> int:
        """How many they are."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Collectives of a run. Bytes and times are per emulated token (or decode step) and layer with experts."""

    transport: Transport
    layers: int
    """Layers whose exchanges travel as one."""
    dense_layers: int
    """The first layers have no experts, and exchange nothing."""
    top_k: int
    """Experts per token."""
    dispatch_bytes: float
    """All copies of a token's dispatch, those for the own experts included."""
    combine_bytes: float
    prefill_expert_ns: float
    """Experts' time per token in prefill."""
    decode_expert_ns: float
    """Experts' time per decode step: their weights are read, however many tokens there are."""
    cnic_rate_bps: int

    def __post_init__(self) -> None:
        """Raises ConfigError for a part without layers."""
        if self.layers < 1:
            raise ConfigError(f"collectives.layers is {self.layers}, but it must be at least 1.")

    def expert_layers(self, begin: int, end: int) -> int:
        """Layers with experts among ``[begin, end)``."""
        return max(0, end - max(begin, self.dense_layers))

    def parts(self, steps: Sequence[tuple[int, int]]) -> tuple[Part, ...]:
        """The parts of a round whose layer steps are ``steps``: no part crosses the end of a step."""
        return tuple(
            Part(step, at, min(at + self.layers, end), at + self.layers >= end)
            for step, (begin, end) in enumerate(steps)
            for at in range(begin, end, self.layers)
        )

    def share(self, engines: Sequence[str], sender: str, receiver: str) -> float:
        """Which part of its ``dispatch_bytes`` an engine sends to another of its group over the NIC."""
        if self.transport == "rdma":
            return 1 / len(engines)
        if node_of(sender) == node_of(receiver) or gpu_index(sender) != gpu_index(receiver):
            return 0.0
        nodes = len({node_of(engine) for engine in engines})
        hit = min(1 - (1 - 1 / nodes) ** self.top_k, NODES_PER_TOKEN / nodes)
        return hit / self.top_k

    def shard_bytes(self, tokens: int, layers: int, share: float, *, combine: bool) -> int:
        """Bytes of a shard for ``layers`` layers with experts; ``tokens`` are of whom the dispatch came from."""
        size = self.combine_bytes if combine else self.dispatch_bytes
        return round(tokens * layers * share * size)

    def network_ns(self, tokens: int, layers: int, share: float) -> int:
        """Time that an idle CNIC needs for dispatch and combine of an engine that sends ``share`` of them away."""
        size = tokens * layers * share * (self.dispatch_bytes + self.combine_bytes)
        return round(size * 8 * NS_PER_S / self.cnic_rate_bps)
