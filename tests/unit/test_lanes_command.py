"""``testbed lanes`` and the kernel's offers: what is printed, what is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.cli.lanes import LanesRequest, lanes
from testbed.errors import ConfigError, HostError
from testbed.fabric.live import lane_offers
from testbed.fabric.live.addresses import Plan, PortKind
from testbed.fabric.live.lanes import queues_of
from testbed.fabric.live.tc import ets_qdisc, prio_qdisc, read_bands
from testbed.fabric.spec import ClusterSpec, LaneDiscipline
from tests.unit.test_cli import testbed as cli

UNKNOWN = "Specified qdisc kind is unknown (ENOENT)"


def printed(capsys: pytest.CaptureFixture[str], request: LanesRequest) -> str:
    assert lanes(request) == 0
    return capsys.readouterr().out


def test_every_discipline_has_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = {line.split()[1]: line for line in printed(capsys, LanesRequest()).splitlines() if line.startswith("│")}
    assert set(rows) == {discipline.value for discipline in LaneDiscipline}
    assert "99.00 % / 1 %" in rows["htb"] and "99.59 % / 0.415 %" in rows["ets"] and "19.7 us" in rows["ets"]
    assert "100 % / 0 %" in rows["prio"] and "for ever" in rows["prio"]
    assert "as offered" in rows["none"] and "99.90 % / 0.104 %" in rows["infiniband"]


def test_a_run_refuses_tables_that_never_serve_what_it_needs_and_warns_of_others(tmp_path: Path) -> None:
    file, out = tmp_path / "opensm.conf", ["--world", "sim", "--out", str(tmp_path / "runs")]
    small = {"cluster.lanes": "infiniband", "cluster.opensm": str(file), "workload.agents": 1, "workload.max_turns": 1}
    settings = [text for key, value in small.items() for text in ("--set", f"{key}={value}")]
    for lane, more, tables in (
        ("KV", [], "qos_vlarb_high 0:192\nqos_vlarb_low 0:64,2:0\n"),
        ("model traffic", ["--set", "collectives.transport=rdma"], "qos_vlarb_high 3:1\nqos_vlarb_low 2:64\n"),
    ):
        file.write_text(f"qos_high_limit 10\n{tables}")
        done = cli("run", "quickstart", *out, *settings, *more)
        assert done.code == 2 and f"{file}: {lane} has a share of 0 even when all others idle" in done.err
    assert not (tmp_path / "runs").exists()
    file.write_text("qos_high_limit 255\nqos_vlarb_high 0:192\nqos_vlarb_low 2:64\n")
    done = cli("run", "quickstart", *out, *settings)
    assert done.code == 0 and f"warning: {file}: KV has a share of 0" in done.err


def test_tables_of_a_file_are_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "opensm.conf"
    file.write_text("qos_high_limit 255\nqos_vlarb_high 0:192\nqos_vlarb_low 2:64\n")
    out = printed(capsys, LanesRequest(opensm=str(file)))
    assert "warning: KV has a share of 0" in out and "qos_high_limit is 255" in out
    file.write_text("qos_high_limit 300\nqos_vlarb_high 0:192\nqos_vlarb_low 2:64\n")
    with pytest.raises(ConfigError, match="qos_high_limit: 300"):
        lanes(LanesRequest(opensm=str(file)))


@pytest.mark.parametrize(
    ("request_", "needle"),
    [
        (LanesRequest(discipline="hbt"), "did you mean 'htb'"),
        (LanesRequest(discipline="ets", opensm="x"), "tables of infiniband, not of ets"),
        (LanesRequest(rate_gbps=-1), "--rate-gbps is -1"),
    ],
)
def test_bad_arguments_are_refused(request_: LanesRequest, needle: str) -> None:
    with pytest.raises(ConfigError, match=needle):
        lanes(request_)


def test_auto_takes_the_best_there_is_and_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {lanes: UNKNOWN if lanes.value in ("prio", "ets") else "" for lanes in lane_offers.MODULES}
    monkeypatch.setattr(lane_offers, "kernel_lanes", lambda: lacking)
    assert lane_offers.settled("auto") == "htb"
    with pytest.raises(HostError, match=r"no lanes ets .*ENOENT.*: set cluster\.lanes to htb or none") as caught:
        lane_offers.settled("ets")
    assert caught.value.exit_code == 2
    monkeypatch.setattr(lane_offers, "kernel_lanes", lambda: dict.fromkeys(lane_offers.MODULES, ""))
    assert [lane_offers.settled(name) for name in ("auto", "prio", "none")] == ["ets", "prio", "none"]


def test_the_options_of_bands_are_read_as_they_are_written() -> None:
    for request, kind, wanted in (
        (prio_qdisc(0x20000, 0x10001, 2), "prio", ([0, 0], {1})),
        (ets_qdisc(0x20000, 0x10001, (983_040, 4096)), "ets", ([983_040, 4096], {1})),
    ):
        name = request.index(kind.encode() + b"\0")
        options = memoryview(request)[name + (len(kind) + 1 + 3) // 4 * 4 + 4 :]
        assert read_bands(kind, options) == wanted


@pytest.mark.parametrize("lanes", ["htb", "prio", "ets"])
def test_every_source_of_kv_has_a_queue_and_every_packet_has_one(lanes: str) -> None:
    spec = ClusterSpec(
        name="test", prefill_nodes=2, decode_nodes=2, gpus_per_node=1, storage_servers=1, cnic_rate_bps=100_000_000,
        snic_rate_bps=100_000_000, pcie_rate_bps=128_000_000, dram_rate_bps=1_000_000_000,
        lanes=LaneDiscipline(lanes),
    )  # fmt: skip
    for port in Plan(spec).ports.values():
        queues = queues_of(port)
        leaves = {cls.classid for cls in queues.classes if cls.leaf} | set(queues.turns)
        assert queues.default in leaves and queues.rest in leaves
        if port.kind is PortKind.LANES:
            of_sources = [match.target for match in queues.matches if [k.offset for k in match.keys] == [12]]
            assert len(set(of_sources)) == len(port.sources) and set(of_sources) < leaves
