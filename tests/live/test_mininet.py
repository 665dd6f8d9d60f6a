"""Mininet's CLI on our namespaces: what it lists, what it runs, and that it needs none of Mininet's helpers."""

from __future__ import annotations

import contextlib
import io
import logging
import re

import pytest

from testbed.fabric.live.mininet_face import PlanTopo, interactive
from tests.live.sandboxed import in_sandbox, small_spec
from topologies.mininet_topo import ClusterTopo, topos

GPUS = 1


def run_cli(*commands: str) -> str:
    """What the CLI prints for some commands on a small cluster."""

    def body() -> str:
        from mininet.log import lg

        printed = io.StringIO()
        handler = lg.handlers[0]
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(printed)
        with contextlib.redirect_stdout(printed):
            assert interactive(small_spec(gpus=GPUS), list(commands)) == 0
        return printed.getvalue()

    return in_sandbox(body)


def test_topology_names_every_host_and_switch() -> None:
    spec = small_spec(decode=2, gpus=2)
    topo = ClusterTopo(spec)
    assert sorted(topo.switches()) == ["compute", "control", "storage"]
    assert len(topo.hosts()) == 3 + 3 * 2 + 1 + 1
    assert sorted(PlanTopo(spec).hosts()) == sorted(topo.hosts())
    assert len(topos["cluster"]("2", "4", "8").hosts()) == 6 + 48 + 2 + 1


@pytest.mark.live
def test_nodes_net_and_links_show_the_three_networks() -> None:
    printed = run_cli("nodes", "net", "links")
    assert "compute control ctl0 de0 de0gpu0 pe0 pe0gpu0 st0 storage" in printed
    assert "pe0 control:to-pe0 snic:pe0.snic mem0:pe0.cnic0 copy0:copy" in printed
    assert "pe0gpu0 control:to-pe0gpu0 cnic:pe0.cnic0 copy:copy0" in printed
    assert "cnic<->pe0.cnic0 (OK OK)" in printed
    assert "DOWN" not in printed


@pytest.mark.live
def test_pingall_reaches_everybody() -> None:
    assert "0% dropped (30/30 received)" in run_cli("pingall")


@pytest.mark.live
def test_a_link_that_is_down_is_shown_and_not_reached_until_it_is_up_again() -> None:
    printed = run_cli(
        "link pe0 storage down", "links", "pingpair", "pingall", "link pe0 storage up", "pingall", "links"
    )
    down, up = printed.split("(28/30 received)")
    assert "snic<->pe0.snic (NO-CARRIER DOWN)" in down
    assert "0% dropped (30/30 received)" in up
    assert "snic<->pe0.snic (OK OK)" in up  # asked last: the kernel tells of a carrier a moment after it is there


@pytest.mark.live
def test_commands_run_in_the_namespace_of_their_node() -> None:
    printed = run_cli("pe0gpu0 cat /proc/net/dev", "ctl0 echo $((6 * 7))", "py de0.pexec('cat', '/proc/net/dev')[0]")
    of_gpu, of_node = printed.split("42")
    assert "pcie_rx:" in of_gpu
    assert "copy0:" in of_node
    assert "pcie_rx" not in of_node


@pytest.mark.live
def test_no_shell_runs_until_a_command_is_typed() -> None:
    printed = run_cli("dump", "st0 true", "dump")
    first, second = printed.count("pid=None"), printed.count("pid=")
    assert second == 2 * 9
    assert first == 2 * 9 - 1


@pytest.mark.live
def test_ping_and_iperf3_work_by_endpoint_name_in_a_node_shell() -> None:
    printed = run_cli(
        "pe0 ping -c2 -i 0.01 st0",
        "pe0gpu0 ping -c1 de0.cnic0",
        "de0gpu0 iperf3 -s -1 > /dev/null &",
        "pe0gpu0 while ! iperf3 -c de0gpu0.cnic -B pe0gpu0.cnic -t 1 2> /dev/null; do :; done",
    )
    assert re.search(r"2 packets transmitted, 2 received, 0% packet loss", printed)
    assert re.search(r"64 bytes from (de0\.cnic0 \()?10\.2\.2\.1", printed)
    rates = [float(rate) for rate in re.findall(r"([\d.]+) Mbits/sec +(?:\d+ +)?receiver", printed)]
    assert rates
    assert 60 < rates[-1] < 110


@pytest.mark.live
def test_mininets_own_iperf_measures_the_link() -> None:
    for _ in range(3):  # the host may be busy with something else once or twice
        rate = re.search(r"\['([\d.]+) Mbits/sec'", run_cli("iperf pe0gpu0 de0"))
        assert rate
        if 80 < float(rate[1]) < 98:
            break
    assert 80 < float(rate[1]) < 98
