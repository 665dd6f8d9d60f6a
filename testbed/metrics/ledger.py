"""The traffic ledger: what the step counts of the paper predict for the requests served, against the kernel's counters.

Steps are those of Figure 4 (reference, section 3); H are the hit blocks of a request, M its other blocks, the partial
tail included, which travels padded to a whole block; all transfers are whole Layer Blocks.

=========================  ==========================================  ==========================================
step                       PE path                                     DE path
=========================  ==========================================  ==========================================
storage read               H into the PE node's SNIC, DRAM             H into the DE node's SNIC, DRAM
hits to PE HBM, by layer   PE DRAM, PE CNIC read (3) and write (4)     DE DRAM, DE CNIC read (3), PE CNIC write (5)
PE HBM to DE buffer        H+M: PE CNIC read (5), DE CNIC write (7)    M: PE CNIC read, DE CNIC write
prompt to DE HBM, once     H+M: DE DRAM, DE CNIC read (8), write (9)   H+M: DE DRAM, DE CNIC read (6), write (7)
generated full block       DE CNIC read and write (D2H), DE DRAM       the same
write-back                 new full blocks x replicas: DE DRAM, SNIC   the same
=========================  ==========================================  ==========================================

Hits that a node's DRAM kept (``dram_cache_bytes``) are not read from storage; the other steps stay.

Of a split read the PE path has the hits that the PE node reads, and all misses; the DE path the other hits.

Where local copies go over the copy engine (steps 3-4, 8-9 of the PE path, 6-7 of the DE path, generated blocks), they
take DRAM and PCIe and no CNIC. PCIe of a GPU carries what its HBM sends and receives; DRAM of a node all that enters
or leaves it. To the KV comes what the data plane adds to each write: a header, and a seal per Layer Block.

Which storage server serves a block is decided by queues at run time: the sum over servers is checked, where their
ports are counted. A prompt prefilled in chunks loads its hits again for every chunk, and what earlier chunks computed
from the DE buffer. TCP and lower headers are not predicted: counters give payload. Model traffic, in the high lane, is
predicted apart (``collectives.expected_exchanges``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.ids import cnic_dram_endpoint, node_of
from testbed.metrics.views import CounterView, RoundView
from testbed.protocol.layout import BlockLayout

STORAGE = "storage"
FLOOR_BLOCKS = 32
"""A resource that should carry less than this many Full Blocks is judged against that: stray packets are no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCosts:
    """What the data plane adds: bytes per write, and per Layer Block."""

    header_bytes: int
    seal_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One resource and direction of one system. ``error`` is relative to what was expected (or to the floor)."""

    system: str
    resource: str
    expected_bytes: int
    measured_bytes: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBy:
    """How a system serves: layers of each step (all layers in one without layerwise prefill), replicas, KV at all,
    whether local copies go over the copy engine, and whether new blocks are written back."""

    layout: BlockLayout
    step_layers: tuple[int, ...]
    replicas: int
    moves_kv: bool
    wire: WireCosts
    direct_copies: bool = False
    writes_back: bool = True


def expected_traffic(rounds: Sequence[RoundView], how: ServedBy) -> Counter[str]:
    """Payload bytes per resource for the rounds that completed."""
    ledger: Counter[str] = Counter()
    if how.moves_kv:
        for served in rounds:
            if served.completed_ns and not served.error:
                _add_round(ledger, served, how)
    return ledger


def _add_round(ledger: Counter[str], r: RoundView, how: ServedBy) -> None:
    layout = how.layout
    prompt, hits = layout.blocks(r.prompt_tokens), r.hit_tokens // layout.block_tokens
    prompt_full = layout.full_blocks(r.prompt_tokens)
    generated = layout.full_blocks(r.prompt_tokens + r.generate_tokens - 1) - prompt_full if how.writes_back else 0
    pe, de = _Engine(r.prefill_engine), _Engine(r.decode_engine)
    de_hits = r.de_hit_tokens // layout.block_tokens
    block = _write_bytes(how, 1, layout.layers)

    def by_step(blocks: int) -> int:
        return sum(_write_bytes(how, blocks, layers) for layers in how.step_layers) if blocks else 0

    within_pe = () if how.direct_copies else (pe.cnic_read, pe.cnic_write)
    within_de = () if how.direct_copies else (de.cnic_read, de.cnic_write)
    in_dram, in_de_dram = r.dram_hit_tokens // layout.block_tokens, r.de_dram_hit_tokens // layout.block_tokens
    for reader, read in ((pe, hits - de_hits - (in_dram - in_de_dram)), (de, de_hits - in_de_dram)):
        _add(ledger, read * block, f"{STORAGE}.snic.tx", f"{reader.node}.snic.rx", reader.dram)
    for cached in (hits, *r.chunk_blocks.values()):
        _add(ledger, by_step(hits - de_hits), pe.dram, *within_pe, pe.pcie_in)
        _add(ledger, by_step(de_hits), de.dram, de.cnic_read, pe.cnic_write, pe.pcie_in)
        _add(ledger, by_step(cached - hits), de.dram, de.cnic_read, pe.cnic_write, pe.pcie_in)
    _add(
        ledger,
        by_step(prompt - de_hits),
        pe.pcie_out,
        pe.cnic_read,
        de.cnic_write,
        de.dram,
    )
    if r.generate_tokens > 1:
        whole_prompt = _write_bytes(how, prompt, layout.layers)
        _add(ledger, whole_prompt, de.dram, *within_de, de.pcie_in)
    _add(ledger, generated * block, de.pcie_out, *within_de, de.dram)
    persisted = (prompt_full - hits + generated) * how.replicas if how.writes_back else 0
    _add(ledger, persisted * block, de.dram, f"{de.node}.snic.tx", f"{STORAGE}.snic.rx")


class _Engine:
    """Names of the resources around one GPU."""

    __slots__ = ("cnic_read", "cnic_write", "dram", "node", "pcie_in", "pcie_out")

    def __init__(self, engine: str) -> None:
        cnic = cnic_dram_endpoint(engine)
        self.node = node_of(engine)
        self.dram = f"{self.node}.dram"
        self.cnic_read, self.cnic_write = f"{cnic}.read", f"{cnic}.write"
        self.pcie_in, self.pcie_out = f"{engine}.pcie.rx", f"{engine}.pcie.tx"


def _write_bytes(how: ServedBy, blocks: int, layers: int) -> int:
    """One write of ``layers`` Layer Blocks of each of ``blocks`` blocks."""
    pieces = blocks * layers
    return how.wire.header_bytes + pieces * (how.layout.layer_block_bytes + how.wire.seal_bytes)


def _add(ledger: Counter[str], size: int, *resources: str) -> None:
    for resource in resources:
        ledger[resource] += size


def settle(
    system: str,
    expected: Mapping[str, int],
    counters: Mapping[str, CounterView],
    layout: BlockLayout,
    *,
    high: Mapping[str, int] | None = None,
    lanes: bool = True,
) -> list[LedgerEntry]:
    """Every counted resource against its prediction, storage servers as one; what should be idle must be.

    ``high``: what is expected in the high lane, on top of ``expected``. A NIC's lanes are judged each by itself, or KV
    in the wrong one would not show in the sum; where there are no ``lanes``, the sum is.
    """
    high = high or {}
    measured: Counter[str] = Counter()
    measured_high: Counter[str] = Counter()
    for name, counter in counters.items():
        host, _, rest = name.partition(".")
        key = f"{STORAGE}.{rest}" if host.startswith("st") else name
        apart = counter.high.payload_bytes if lanes and _has_lanes(name) else 0
        measured[key] += counter.data.payload_bytes - apart
        if apart or (lanes and _has_lanes(name) and high.get(name)):
            measured_high[key] += apart
    floor = FLOOR_BLOCKS * layout.full_block_bytes

    def entry(resource: str, found: int, due: int) -> LedgerEntry:
        error = (found - due) / max(due, floor)
        return LedgerEntry(system=system, resource=resource, expected_bytes=due, measured_bytes=found, error=error)

    return [
        *(
            entry(name, found, expected.get(name, 0) + (0 if name in measured_high else high.get(name, 0)))
            for name, found in measured.items()
        ),
        *(entry(f"{name} (high lane)", found, high.get(name, 0)) for name, found in measured_high.items()),
    ]


def _has_lanes(resource: str) -> bool:
    """Whether a resource is a NIC: memories and PCIe links have no lanes."""
    return resource.split(".")[1].startswith(("cnic", "snic"))
