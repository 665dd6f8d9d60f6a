"""What every world must do alike: small clusters and workloads, each for one corner of the protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from testbed.fabric.spec import ClusterSpec
from testbed.protocol.layout import BlockLayout
from testbed.protocol.params import ProtocolParams
from testbed.protocol.submission import SubmissionCosts
from tests.support.local_world import ListScript
from tests.support.worlds import cluster, small_params

LAYOUT = BlockLayout(model="any", layers=3, block_tokens=4, bytes_per_token_layer=8)
APART_NS = 2_000_000_000
"""So far apart that an agent has ended when the next arrives: hits across agents then do not depend on timing."""

Turns = tuple[tuple[int, int], ...]
_TALK: Turns = ((21, 9), (5, 6), (9, 3), (3, 8))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload on one cluster. ``turns``: (append, generate) per agent; ``shared`` tokens begin all of them.

    ``chunked``: prompts are prefilled in chunks, so some bytes are loaded more than once, how many depends on timing.
    """

    name: str
    turns: tuple[Turns, ...] = (_TALK, _TALK, _TALK)
    shared: int = 0
    apart: bool = False
    chunked: bool = False
    nodes: tuple[int, int] = (1, 1)
    gpus: int = 1
    changes: dict[str, object] = field(default_factory=dict)

    @property
    def spec(self) -> ClusterSpec:
        """The cluster."""
        return cluster(*self.nodes, gpus=self.gpus)

    @property
    def params(self) -> ProtocolParams:
        """Its parameters."""
        return small_params(LAYOUT, **self.changes)

    @property
    def scripts(self) -> list[ListScript]:
        """Its agents."""
        return [ListScript(f"a{i}", turns, seed=7, shared=self.shared) for i, turns in enumerate(self.turns)]

    @property
    def starts_ns(self) -> list[int]:
        """When they arrive."""
        return [i * APART_NS if self.apart else 0 for i in range(len(self.turns))]

    @property
    def replicas(self) -> int:
        """Copies of a block."""
        return self.params.replicas


_ROOM = LAYOUT.blocks(64) + 1
CASES = (
    Case(name="plain"),
    Case(name="larger cluster", nodes=(2, 2), gpus=2, turns=(_TALK,) * 6),
    Case(name="steps of two layers", changes={"layer_group": 2, "layers_in_flight": 1}),
    Case(name="chunked prefill", chunked=True, changes={"compute_quota_ns": 8 * LAYOUT.layers * 1_000}),
    Case(name="single tokens", turns=(((9, 1), (3, 1), (5, 1)), ((4, 1), (8, 1), (1, 1)))),
    Case(name="shared prefixes", shared=17, apart=True),
    Case(name="whole blocks", turns=(((8, 5), (4, 4), (4, 1)), ((12, 1), (3, 9)))),
    Case(
        name="DRAM pressure",
        turns=(_TALK,) * 5,
        changes={"dram_pages": _ROOM, "stage_pages": 1, "storage_pages": 1, "read_window_blocks": 1},
    ),
    Case(name="HBM pressure", turns=(_TALK,) * 5, changes={"de_hbm_pages": _ROOM, "persist_window_blocks": 1}),
)

CACHE_CASES = (
    Case(name="DRAM cache", changes={"dram_cache_pages": 100}),
    Case(name="small DRAM cache", turns=(_TALK,) * 2, apart=True, changes={"dram_pages": _ROOM, "dram_cache_pages": 6}),
    Case(name="cached prefixes", nodes=(2, 2), shared=17, apart=True, changes={"dram_cache_pages": 30}),
)

COPY_CASES = (
    Case(name="larger cluster", nodes=(2, 2), gpus=2, turns=(_TALK,) * 6),
    Case(name="chunked prefill", chunked=True, changes={"compute_quota_ns": 8 * LAYOUT.layers * 1_000}),
    Case(name="one copy at a time", changes={"submission": SubmissionCosts(copy_ns=50_000, copies_outstanding=1)}),
)
"""For systems whose local copies take another path."""
