"""Two lanes of one real CNIC under load: what each gets, and how long messages of the model's take beside KV.

Model traffic leaves one GPU for two others, so that only the CNIC it leaves by can be its bottleneck; KV leaves the
same CNIC from the node's DRAM. Shares come from the receivers, who know which stream is which, and more exactly from
the kernel's counters between the first and the last packet of KV that leaves.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from testbed.fabric.live.calibrate import PAYLOAD_SHARE
from testbed.fabric.live.counters import read_counters
from testbed.fabric.live.lanes import EXPEDITED_FORWARDING
from testbed.fabric.live.network import Network
from testbed.fabric.live.streams import Flow, FlowResult, run_streams

PORT = "pe0.cnic0.read"
MODEL = tuple(
    Flow(name="model", source="pe0gpu0.cnic", destination=f"{gpu}.cnic", tos=EXPEDITED_FORWARDING)
    for gpu in ("pe0gpu1", "de0gpu0")
)
KV = Flow(name="kv", source="pe0.cnic0", destination="de0.cnic1")
_WARM_UP_S = 0.25
_EVERY_S = 0.01


@dataclass(frozen=True)
class Load:
    """Two saturated lanes. ``model_share``: the model's part of all payload that arrived; ``kv_share``: KV's part of
    the bytes that left, between its first and its last packet (None: fewer than three left)."""

    model_share: float
    kv_share: float | None
    kv_bytes: int


@contextmanager
def streams(network: Network, flows: tuple[Flow, ...], seconds: float) -> Iterator[dict[str, FlowResult]]:
    """Run streams beside the block; their results are complete behind it."""
    results: dict[str, FlowResult] = {}

    def run() -> None:
        results.update(run_streams(network, flows, seconds=_WARM_UP_S + seconds, warm_up_s=_WARM_UP_S))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(_WARM_UP_S)
    try:
        yield results
    finally:
        thread.join()


def both_lanes(network: Network, seconds: float) -> Load:
    """Saturate both lanes for ``seconds``."""
    seen: list[tuple[int, int]] = []
    with streams(network, (*MODEL, KV), seconds) as results:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            counter = read_counters(network, PORT)[PORT]
            seen.append((counter.high.bytes, counter.kv.bytes))
            time.sleep(_EVERY_S)
    changes = [now for before, now in itertools.pairwise(seen) if now[1] != before[1]]
    high, kv = (changes[-1][lane] - changes[0][lane] for lane in (0, 1)) if len(changes) > 2 else (0, 0)
    arrived = {name: result.total_bytes for name, result in results.items()}
    return Load(
        model_share=arrived["model"] / (arrived["model"] + arrived["kv"]),
        kv_share=kv / (high + kv) if kv else None,
        kv_bytes=seen[-1][1] - seen[0][1],
    )


def kv_alone(network: Network, seconds: float) -> float:
    """What KV gets of the link, as payload, while the high lane idles."""
    with streams(network, (KV,), seconds) as results:
        pass
    return results["kv"].steady_bps / (network.spec.cnic_rate_bps * PAYLOAD_SHARE)


def message_seconds(
    network: Network,
    size_bytes: int,
    count: int,
    over: Callable[[], bool] = lambda: False,
    *,
    tos: int = EXPEDITED_FORWARDING,
) -> list[float]:
    """How long messages (the model's) take, one after the other, from the first byte in to the last out: ``count`` of
    them, or until ``over``."""
    there, here = network.endpoints["pe0gpu1.cnic"], network.endpoints["pe0gpu0.cnic"]
    with network.inside(there.host):
        server = socket.create_server((there.address, 0))
    with network.inside(here.host):
        sender = socket.socket()
    with server, sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * size_bytes)
        sender.bind((here.address, 0))
        sender.connect(server.getsockname())
        receiver, _ = server.accept()
        with receiver:
            taken: list[float] = []
            while len(taken) < count and not over():
                taken.append(_one_message(sender, receiver, size_bytes))
            return taken


def _one_message(sender: socket.socket, receiver: socket.socket, size_bytes: int) -> float:
    start = time.monotonic()
    sender.sendall(bytes(size_bytes))
    left = size_bytes
    while left:
        left -= len(receiver.recv(left))
    return time.monotonic() - start


def messages_beside_kv(network: Network, size_bytes: int, count: int, seconds: float) -> list[float]:
    """The same while the KV lane is saturated, for ``seconds``."""
    with streams(network, (KV,), seconds) as results:
        return message_seconds(network, size_bytes, count, over=lambda: bool(results))
