"""Goodput of the protocol on a shaped CNIC beside a raw TCP stream on the same CNIC, one after the other.

Run: ``python -m tests.bench.bench_shaped``. The transfer is a local H2D at 200 Mbit/s: node DRAM to HBM, out of the
CNIC and back in by the switch port's reflection. Both are counted as payload; what the protocol adds (its header and 8
bytes per Layer Block) is overhead. Target: 0.95 of the raw stream. The raw stream is also held against the theoretical
goodput of the rate, 1448 of 1514 bytes (Ethernet, IPv4 and TCP with timestamps counted): calibration, target 1 %.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace

from testbed.fabric.live.calibrate import PAYLOAD_SHARE
from testbed.fabric.live.network import Network
from testbed.fabric.live.sandbox import run_in_sandbox
from testbed.fabric.live.sockets import DEFAULT_OPTIONS
from testbed.fabric.live.streams import Flow, run_streams
from tests.bench.bench_dataplane import Case, destination, forked, layout, source
from tests.bench.bench_network import cluster

RATE_MBIT = 200
TARGET_SHARE = 0.95
TARGET_CALIBRATION = 0.01
SECONDS = 4.0


def raw(network: Network) -> float:
    """Payload bit/s of a plain TCP stream."""
    flow = Flow(name="raw", source="pe0.cnic0", destination="pe0gpu0.cnic")
    return run_streams(network, [flow], seconds=SECONDS, warm_up_s=0.5)["raw"].steady_bps


def protocol(network: Network) -> float:
    """KV payload bit/s of granted, sealed writes between the same two ends."""
    ends = {
        "a": replace(network.endpoints["pe0.cnic0"], name="a"),
        "b": replace(network.endpoints["pe0gpu0.cnic"], name="b"),
    }
    case = Case("shaped", layout(24), blocks=32, piece_layers=10, depth=4, seconds=SECONDS)
    result = 0.0

    def receive(line: socket.socket) -> None:
        network.enter("pe0gpu0")
        asyncio.run(destination(case, line, ends, DEFAULT_OPTIONS))

    def send(line: socket.socket) -> None:
        nonlocal result
        with network.inside("pe0"):
            bytes_per_s, _ = asyncio.run(source(case, ends, DEFAULT_OPTIONS))
        line.send(b"s")
        line.recv(64)
        result = bytes_per_s * 8

    forked(receive, send)
    return result


def measure() -> int:
    """In the sandbox."""
    good = True
    with Network(cluster(1, 1, 1, RATE_MBIT)) as network:
        for _ in range(3):
            plain, ours = raw(network), protocol(network)
            error = plain / (RATE_MBIT * 1e6 * PAYLOAD_SHARE) - 1
            good = good and ours / plain >= TARGET_SHARE and abs(error) <= TARGET_CALIBRATION
            print(
                f"CNIC at {RATE_MBIT} Mbit/s: raw TCP {plain / 1e6:.1f} ({error:+.2%} of theory), "
                f"protocol {ours / 1e6:.1f} Mbit/s, {ours / plain:.3f} of raw (target {TARGET_SHARE})",
                flush=True,
            )
    return 0 if good else 1


def main() -> int:
    """Exit code 1 below a target."""
    return run_in_sandbox(measure)


if __name__ == "__main__":
    sys.exit(main())
