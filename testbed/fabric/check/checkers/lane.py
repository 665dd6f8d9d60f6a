"""Lane: KV never on the high lane, which is the model's.

Bulk data has one way, the Write: it leaves through an endpoint of its own role, stays on one of the two networks
(storage NIC to storage NIC, compute NIC to compute NIC, Figure 4), and those endpoints carry the KV lane only; or it
goes over the copy engine's direct link of one GPU, if the system has it, which no lane is on. The
model's own traffic is not modelled, so nothing of it can meet KV here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from testbed.ids import engine_of, is_copy_endpoint
from testbed.protocol.machine import Write

NAME = "lane"


def at_write(role: str, own: Collection[str], everywhere: Collection[str], write: Write) -> Iterator[str]:
    """``own``: endpoints of the posting role; ``everywhere``: of all roles."""
    via, to = write.via, write.ref.endpoint
    if via not in own:
        yield f"{role} posts a write through {via}, which is not its own"
    elif to not in everywhere:
        yield f"{role} posts a write to {to}, which nobody owns"
    elif _network(via) != _network(to):
        yield f"{role} posts a write from {via} to {to}: these are not on one network"


def _network(endpoint: str) -> str:
    if is_copy_endpoint(endpoint):
        return engine_of(endpoint)
    return "storage" if endpoint.endswith(".snic") else "compute"
