"""``testbed capture``: what the packets of a link say of its lanes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from testbed.capture.lanes import Cargo, DirectionVerdict, Lane, LaneWaits, judge, waits
from testbed.capture.packets import read_packets
from testbed.errors import ConfigError
from testbed.fabric.live.lanes import EXPEDITED_FORWARDING
from testbed.units import NS_PER_MS


def capture(path: Path, entering: Sequence[Path] = ()) -> int:
    """Print the verdict on a capture. Result: 1 if anything is in a lane that is not its own, else 0.

    ``entering`` are captures, of the same run, of the memories behind a CNIC: with them it is told who waited for whom.

    Raises:
        ConfigError: not a capture, or one without a packet.
    """
    packets = list(read_packets(path))
    if not packets:
        raise ConfigError(f"{path}: no TCP packet is in it; was the link idle?")
    left, entered = judge(packets)
    console = Console(highlight=False)
    console.print(_table(path, left, entered))
    if entering:
        came = [packet for other in entering for packet in read_packets(other) if packet.leaving]
        console.print(_waits(waits(came, (packet for packet in packets if packet.leaving))))
    wrong = [line for way, verdict in (("sent", left), ("received", entered)) for line in _wrong(way, verdict)]
    sys.stdout.write("\n".join(wrong) + "\n" if wrong else "Every byte is in its lane.\n")
    return 1 if wrong else 0


def _table(path: Path, left: DirectionVerdict, entered: DirectionVerdict) -> Table:
    table = Table(title=f"{path.name}: what the link has sent and received", title_justify="left")
    table.add_column("")
    for way in ("sent", "received"):
        table.add_column(way, justify="right")
    verdicts = (left, entered)
    for lane, name in ((Lane.HIGH, "high lane"), (Lane.KV, "KV lane"), (Lane.ACK, "acknowledgements")):
        counts = [verdict.lanes[lane] for verdict in verdicts]
        table.add_row(f"{name}: packets", *(f"{count.packets:,}" for count in counts))
        table.add_row(f"{name}: payload, bytes", *(f"{count.payload_bytes:,}" for count in counts))
        table.add_row(f"{name}: DSCP seen", *(", ".join(map(_dscp, sorted(count.dscp))) or "-" for count in counts))
    for cargo in Cargo:
        if any(verdict.cargo_bytes[cargo] for verdict in verdicts):
            table.add_row(f"{cargo.value}: payload, bytes", *(f"{v.cargo_bytes[cargo]:,}" for v in verdicts))
    return table


def _waits(found: LaneWaits) -> str:
    if not found.packets:
        return "No packet of the high lane was seen both before the lanes and after them: nothing to say of waits."
    return (
        f"{found.packets:,} packets of the high lane waited {found.longest_ns / NS_PER_MS:.3f} ms at most; "
        f"{found.kv_share:.1%} of what left meanwhile was KV, {found.most_kv_ahead:,} bytes before one packet at most; "
        f"one overtook {found.most_overtaken:,} bytes of KV."
    )


def _dscp(value: int) -> str:
    return f"EF ({value})" if value == EXPEDITED_FORWARDING >> 2 else str(value)


def _wrong(way: str, verdict: DirectionVerdict) -> list[str]:
    return [
        f"WRONG LANE: {size:,} bytes of {cargo.value} were {way} in the {lane.value} lane."
        for (cargo, lane), size in verdict.misplaced.items()
    ]
