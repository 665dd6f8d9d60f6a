"""How long the network takes to build and to tear down: ``python -m tests.bench.bench_network [runs]``.

For comparison as many bare hosts by Mininet's own means, where they exist: stock Mininet starts a shell per host
through its helper ``mnexec``, which PyPI's package does not bring. Without it (or without ``ip``) the reference is what
Mininet would do besides starting shells: one ``ip`` program for each namespace and veth, one after the other.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

from testbed.fabric.live.counters import read_counters, total_drops, verify_shaping
from testbed.fabric.live.network import Network
from testbed.fabric.live.sandbox import run_in_sandbox
from testbed.fabric.spec import ClusterSpec
from testbed.units import MBIT


def cluster(prefill: int, decode: int, gpus: int, mbit: int) -> ClusterSpec:
    """A cluster in the paper's proportions."""
    return ClusterSpec(
        name=f"{prefill}P{decode}D g={gpus}",
        prefill_nodes=prefill,
        decode_nodes=decode,
        gpus_per_node=gpus,
        storage_servers=2,
        cnic_rate_bps=mbit * MBIT,
        snic_rate_bps=mbit * MBIT,
        pcie_rate_bps=mbit * MBIT * 128 // 100,
        dram_rate_bps=mbit * MBIT * 10,
    )


def seconds_since(start: float) -> float:
    return time.perf_counter() - start


def ours(spec: ClusterSpec, runs: int) -> int:
    for _ in range(runs):
        network = Network(spec)
        start = time.perf_counter()
        network.build()
        build = seconds_since(start)
        start = time.perf_counter()
        read_counters(network)
        counters = seconds_since(start)
        start = time.perf_counter()
        problems = verify_shaping(network)
        verify = seconds_since(start)
        drops = total_drops(network)
        start = time.perf_counter()
        network.close()
        close = seconds_since(start)
        print(
            f"{spec.name}: {len(network.namespaces)} namespaces, {len(network.plan.ports)} shaped ports: "
            f"build {build:.2f} s, close {close:.3f} s, counters {counters * 1e3:.0f} ms, read back {verify:.2f} s, "
            f"{len(problems)} problems, {drops} drops",
            flush=True,
        )
        if problems or drops:
            return 1
    return 0


def stock_mininet(hosts: int) -> int:
    from mininet.link import Link
    from mininet.net import Mininet
    from mininet.nodelib import LinuxBridge

    net = Mininet(controller=None, switch=LinuxBridge, link=Link)
    start = time.perf_counter()
    switch = net.addSwitch("s1")
    for k in range(hosts):
        net.addLink(net.addHost(f"h{k}"), switch)
    net.build()
    net.start()
    print(f"stock Mininet, {hosts} bare hosts on one bridge: build {seconds_since(start):.2f} s", flush=True)
    start = time.perf_counter()
    net.stop()
    print(f"stock Mininet: stop {seconds_since(start):.2f} s", flush=True)
    return 0


def ip_programs(hosts: int) -> int:
    start = time.perf_counter()
    for k in range(hosts):
        for command in (
            f"ip netns add h{k}",
            f"ip link add s{k} type veth peer name eth0 netns h{k}",
            f"ip -n h{k} addr add 10.0.{k // 250}.{k % 250 + 1}/16 dev eth0",
            f"ip -n h{k} link set eth0 up",
            f"ip link set s{k} up",
        ):
            subprocess.run(command.split(), check=True)
    print(f"ip programs, {hosts} bare hosts, no lanes: build {seconds_since(start):.2f} s", flush=True)
    return 0


def main(runs: int = 3) -> int:
    """Exit code 1 when a network is not what was specified, or dropped something."""
    shapes = [(1, 1, 8, 100), (2, 4, 8, 40)]
    for shape in shapes:
        spec = cluster(*shape)
        start = time.perf_counter()
        code = run_in_sandbox(lambda spec=spec: ours(spec, runs))  # type: ignore[misc]
        print(f"{spec.name}: {runs} runs and the sandbox, from start to nothing left: {seconds_since(start):.2f} s")
        if code:
            return code
    hosts = len(Network(cluster(*shapes[-1])).hosts)
    if shutil.which("mnexec") and shutil.which("ifconfig") and shutil.which("brctl"):
        return run_in_sandbox(lambda: stock_mininet(hosts))
    print("stock Mininet cannot run here: it needs mnexec, ifconfig and brctl")
    return run_in_sandbox(lambda: ip_programs(hosts)) if shutil.which("ip") else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
