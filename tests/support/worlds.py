"""Small clusters and workloads for both small worlds, and the paper's step counts for what crosses each NIC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from emulators.agent_driver import Outcome
from testbed.fabric.spec import ClusterSpec
from testbed.ids import cnic_dram_endpoint, cnic_hbm_endpoint, node_of, snic_endpoint
from testbed.protocol.collectives import Collectives
from testbed.protocol.layout import BlockLayout
from testbed.protocol.params import SYSTEMS, ProtocolParams
from tests.support.local_world import LocalWorld
from tests.support.sim_cluster import SimCluster

RATE = 10**8
SERVED = (*SYSTEMS, "dualpath-split")
"""Systems that differ in what is read and sent where."""
COLLECTIVES = Collectives(
    transport="rdma", layers=2, dense_layers=1, top_k=2, dispatch_bytes=64.0, combine_bytes=128.0,
    prefill_expert_ns=500.0, decode_expert_ns=10_000.0, cnic_rate_bps=RATE,
)  # fmt: skip
"""Two parts for TINY's three layers; parts of one layer and none where a step has one layer."""
TINY = BlockLayout(model="tiny", layers=3, block_tokens=4, bytes_per_token_layer=8)


def cluster(prefill: int = 1, decode: int = 1, gpus: int = 1, storage: int = 2) -> ClusterSpec:
    """A cluster whose rates nobody looks at."""
    return ClusterSpec(
        name="small",
        prefill_nodes=prefill,
        decode_nodes=decode,
        gpus_per_node=gpus,
        storage_servers=storage,
        cnic_rate_bps=RATE,
        snic_rate_bps=RATE,
        pcie_rate_bps=RATE,
        dram_rate_bps=RATE,
    )


def small_params(layout: BlockLayout = TINY, **changes: object) -> ProtocolParams:
    """Parameters with memories small enough to be looked at."""
    values: dict[str, object] = {
        "dram_pages": 64,
        "stage_pages": 4,
        "pe_hbm_bytes": 256 * layout.full_block_bytes,
        "de_hbm_pages": 64,
        "storage_pages": 4,
        "read_window_blocks": 8,
        "persist_window_blocks": 4,
        "split_least_blocks": 1,
        "wait_deadline_ns": 2_000_000_000,
        "fetch_interval_ns": 2_000_000,
    }
    return ProtocolParams(layout=layout, **(values | changes))  # type: ignore[arg-type]


def expected_bytes(
    world: LocalWorld | SimCluster, outcomes: Sequence[Outcome], replicas: int, *, direct: bool = False
) -> Counter[tuple[str, str]]:
    """Bytes per (sending NIC side, receiving NIC side) for completed rounds without chunking (reference, section 3).

    Storage servers are summed under the name "storage": which replica serves is the reader's choice. Written from the
    paper's arrows, not from the machines. ``direct``: local copies go over the copy engine.
    """
    layout, total = world.layout, Counter[tuple[str, str]]()
    bt, block = layout.block_tokens, layout.layers * layout.block_tokens * layout.bytes_per_token_layer
    servers = len(world.plan.storage)
    for o in outcomes:
        hits = o.hit_tokens // bt
        prompt_blocks = -(-o.prompt_tokens // bt)
        prompt_full, context_full = o.prompt_tokens // bt, (o.prompt_tokens + o.generate_tokens - 1) // bt
        pe_dram, pe_hbm = cnic_dram_endpoint(o.prefill_engine), cnic_hbm_endpoint(o.prefill_engine)
        de_dram, de_hbm = cnic_dram_endpoint(o.decode_engine), cnic_hbm_endpoint(o.decode_engine)
        pe_snic, de_snic = (snic_endpoint(node_of(e)) for e in (o.prefill_engine, o.decode_engine))
        de_hits = {"pe": 0, "de": hits, "split": o.de_hit_tokens // bt, "none": 0}[o.read_side]
        assert o.de_hit_tokens == de_hits * bt
        de_kept = o.de_dram_hit_tokens // bt
        pe_kept = o.dram_hit_tokens // bt - de_kept
        assert de_kept <= de_hits and pe_kept <= hits - de_hits
        total["storage", pe_snic] += (hits - de_hits - pe_kept) * block  # PE path 1-2
        total[_direct(pe_dram, pe_hbm) if direct else (pe_dram, pe_hbm)] += (hits - de_hits) * block  # 3-4
        total["storage", de_snic] += (de_hits - de_kept) * block  # DE path 1-2
        total[de_dram, pe_hbm] += de_hits * block  # DE path 3-5
        # PE path 5-7: hits and misses; DE path, unnumbered: the misses return
        total[pe_hbm, de_dram] += (prompt_blocks - de_hits) * block
        if direct:
            de_dram, de_hbm = _direct(de_dram, de_hbm)
        if o.generate_tokens > 1:
            total[de_dram, de_hbm] += prompt_blocks * block  # PE path 8-9, DE path 6-7
        total[de_hbm, de_dram] += (context_full - prompt_full) * block  # every block that decode fills
        total[de_snic, "storage"] += (context_full - hits) * block * min(replicas, servers)
    return Counter({path: size for path, size in total.items() if size})


def _direct(*endpoints: str) -> tuple[str, ...]:
    """The same memories on the direct PCIe link."""
    return tuple(endpoint.replace("cnic", "copy") for endpoint in endpoints)


def seen_bytes(world: LocalWorld | SimCluster) -> Counter[tuple[str, str]]:
    """What the world carried, storage servers summed."""
    names = {snic_endpoint(server): "storage" for server in world.plan.storage}
    total = Counter[tuple[str, str]]()
    for (via, to), size in world.bytes_via.items():
        total[names.get(via, via), names.get(to, to)] += size
    return total
