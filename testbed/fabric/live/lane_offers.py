"""Which lane disciplines this kernel has, and which one a run gets.

Each is made on a throw-away link and read back, in a sandbox; nothing is guessed from version numbers.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from testbed.errors import HostError, UnsupportedError
from testbed.fabric.live import devices
from testbed.fabric.live.addresses import PortKind, ShapedPort, Source
from testbed.fabric.live.lanes import port_messages
from testbed.fabric.live.netlink import NetlinkSocket
from testbed.fabric.live.readback import check_ports
from testbed.fabric.live.sandbox import run_in_sandbox
from testbed.fabric.spec import LaneDiscipline

BEST_FIRST = (LaneDiscipline.ETS, LaneDiscipline.HTB, LaneDiscipline.PRIO)
"""What "auto" takes the first of that is there: ets has the paper's 240 : 1, htb 99 : 1 and starves nobody either, prio
may starve KV; none isolates nothing and is never taken."""

MODULES = {
    LaneDiscipline.HTB: "sch_htb",
    LaneDiscipline.NONE: "sch_htb",
    LaneDiscipline.PRIO: "sch_prio and sch_drr",
    LaneDiscipline.ETS: "sch_ets and sch_drr",
}
"""Of every discipline that the live world can build, the kernel's modules."""

_FIRST_INDEX = 50
_SOURCE = Source(name="a memory", network=ipaddress.IPv4Network("10.2.1.0/24"))


def try_lanes(socket: NetlinkSocket) -> dict[LaneDiscipline, str]:
    """In a sandbox: why each discipline cannot be had; empty if it can."""
    return {lanes: _try(socket, lanes, _FIRST_INDEX + 2 * k) for k, lanes in enumerate(MODULES)}


def _try(socket: NetlinkSocket, lanes: LaneDiscipline, index: int) -> str:
    port = ShapedPort(
        name="a trial link", host="the sandbox", device=f"trial{index}", index=index, rate_bps=100_000_000,
        kind=PortKind.LANES, sources=(_SOURCE,), lanes=lanes,
    )  # fmt: skip
    try:
        socket.run([devices.veth_message(port.device, index, peer=f"far{index}", peer_index=index + 1)])
        socket.run(port_messages(port))
        problems = check_ports(socket, [port])
    except (HostError, OSError) as error:
        return str(error).rstrip(".")
    return problems[0].rstrip(".") if problems else ""


@functools.cache
def kernel_lanes() -> Mapping[LaneDiscipline, str]:
    """``try_lanes`` in a sandbox of its own.

    Raises:
        HostError: the host allows no sandbox.
    """
    with tempfile.TemporaryDirectory(prefix="testbed-lanes-") as folder:
        answer = Path(folder, "answer")

        def entry() -> int:
            with NetlinkSocket.here("the sandbox") as socket:
                outcomes = {lanes.value: problem for lanes, problem in try_lanes(socket).items()}
            answer.write_text(json.dumps(outcomes))
            return 0

        run_in_sandbox(entry)
        outcomes: dict[str, str] = json.loads(answer.read_text()) if answer.exists() else {}
    return {lanes: outcomes.get(lanes.value, "it could not be tried") for lanes in MODULES}


def settled(lanes: str) -> str:
    """The discipline that a live run gets for the scenario's ``cluster.lanes``.

    htb and none are what the testbed is built on and are not tried here; infiniband is refused with the cluster.

    Raises:
        UnsupportedError: this kernel does not have it; the sentence names what else is possible.
        HostError: the host allows no sandbox to try it in.
    """
    if lanes in (LaneDiscipline.HTB.value, LaneDiscipline.NONE.value, LaneDiscipline.INFINIBAND.value):
        return lanes
    offers = kernel_lanes()
    there = [offer for offer in (*BEST_FIRST, LaneDiscipline.NONE) if not offers[offer]]
    if lanes == "auto":
        best = [offer for offer in BEST_FIRST if offer in there]
        return best[0].value if best else LaneDiscipline.HTB.value
    wanted = LaneDiscipline(lanes)
    if wanted in there:
        return lanes
    others = " or ".join(offer.value for offer in there)
    way = f"set cluster.lanes to {others}, which it has, or load" if others else "see `testbed doctor`, and load"
    raise UnsupportedError(f"this kernel has no lanes {lanes} ({offers[wanted]}): {way} {MODULES[wanted]}.")
