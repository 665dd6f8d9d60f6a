"""The verdict on lanes, from packets that are made up; and what is said of files that are no captures."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.capture.lanes import Cargo, Lane, judge, waits
from testbed.capture.packets import Packet, read_packets
from testbed.cli.capture import capture
from testbed.cli.run import RunRequest, prepare
from testbed.errors import ConfigError
from testbed.fabric.live.lanes import EXPEDITED_FORWARDING
from testbed.fabric.live.recorder import (
    COOKED_HEADER,
    FILE_HEADER,
    LEAVING,
    LINK_TYPE_SLL2,
    PCAP_MAGIC_NS,
    RECORD_HEADER,
)
from testbed.fabric.live.sockets import DATA_PORT, EXCHANGE_PORT

KV, MODEL = (1, 2, 40_000, DATA_PORT), (1, 3, 40_000, EXCHANGE_PORT)


PSH_ACK, ACK = 0x18, 0x10


def packet(
    at_ns: int, flow: tuple[int, int, int, int], number: int, *, size: int = 1000, tos: int = -1, flags: int = ACK
) -> Packet:
    if tos < 0:
        tos = EXPEDITED_FORWARDING if flow is MODEL else 0
    return Packet(at_ns, True, flow, tos, size + 52, size, number, flags)


def pcap(*packets: Packet, cut: int = 0) -> bytes:
    data = FILE_HEADER.pack(PCAP_MAGIC_NS, 2, 4, 0, 0, 148, LINK_TYPE_SLL2)
    for p in packets:
        source, destination, source_port, destination_port = p.flow
        ip = bytes([0x45, p.tos]) + p.ip_bytes.to_bytes(2, "big") + bytes(5) + b"\x06" + bytes(2)
        ip += source.to_bytes(4, "big") + destination.to_bytes(4, "big")
        tcp = source_port.to_bytes(2, "big") + destination_port.to_bytes(2, "big") + p.sequence.to_bytes(4, "big")
        record = COOKED_HEADER.pack(0x800, 0, 0, 1, LEAVING if p.leaving else 0, 6, bytes(6))
        record += ip + tcp + bytes(4) + bytes([0x80, p.flags]) + bytes(18)
        data += RECORD_HEADER.pack(0, p.at_ns, len(record), len(record) + p.payload_bytes) + record
    return data[: len(data) - cut]


def test_kv_in_the_high_lane_and_model_traffic_in_the_other_are_named_by_bytes() -> None:
    right = [packet(1, KV, 1), packet(2, MODEL, 1)]
    wrong = [packet(3, KV, 2, tos=EXPEDITED_FORWARDING), packet(4, MODEL, 2, tos=0, size=500)]
    left, entered = judge([*right, *wrong])
    assert left.misplaced == {(Cargo.KV, Lane.HIGH): 1000, (Cargo.MODEL, Lane.KV): 500}
    assert left.cargo_bytes == {Cargo.KV: 2000, Cargo.MODEL: 1500, Cargo.OTHER: 0}
    assert (left.lanes[Lane.HIGH].payload_bytes, left.lanes[Lane.KV].payload_bytes) == (2000, 1500)
    assert not entered.lanes[Lane.KV].packets
    assert judge(right)[0].misplaced == {}


def test_small_packets_pass_for_acknowledgements_unless_they_end_data_but_their_mark_counts() -> None:
    small = [packet(1, KV, 1, size=75, tos=EXPEDITED_FORWARDING), packet(2, KV, 2, size=0)]
    left, _ = judge([*small, packet(3, KV, 3, size=75, flags=PSH_ACK)])
    assert left.lanes[Lane.ACK].packets == 2 and left.lanes[Lane.KV].payload_bytes == 75
    assert left.misplaced == {(Cargo.KV, Lane.HIGH): 75}


def test_what_a_destination_answers_is_an_acknowledgement_whatever_its_size() -> None:
    answer = (2, 1, DATA_PORT, 40_000)
    left, _ = judge([packet(1, answer, 1, size=200, flags=PSH_ACK)])
    assert left.lanes[Lane.ACK].packets == 1 and not left.lanes[Lane.KV].packets


def test_who_waited_for_whom() -> None:
    entering = [packet(k, KV, k) for k in range(5)] + [packet(10, MODEL, 1), packet(11, MODEL, 2), packet(12, KV, 9)]
    in_turn = [packet(20 + k, p.flow, p.sequence) for k, p in enumerate(entering)]
    found = waits(entering, in_turn)
    assert (found.packets, found.most_overtaken, found.most_kv_ahead, found.longest_ns) == (2, 0, 5000, 15)
    assert (found.kv_meanwhile, found.high_meanwhile) == (5000, 2000)
    assert found.kv_share == pytest.approx(5 / 7)

    overtaking = [in_turn[0], *in_turn[5:7], *in_turn[1:5], in_turn[7]]
    overtaking = [packet(20 + k, p.flow, p.sequence) for k, p in enumerate(overtaking)]
    found = waits(entering, overtaking)
    assert (found.packets, found.most_overtaken, found.most_kv_ahead) == (2, 4000, 1000)
    assert found.kv_share == pytest.approx(1 / 3)


def test_waits_of_nothing() -> None:
    assert waits([], [packet(1, MODEL, 1)]).packets == 0
    assert waits([], []).kv_share == 0


def test_a_file_is_read_up_to_where_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.pcap"
    written = [packet(5, KV, 7), packet(6, MODEL, 8)]
    path.write_bytes(pcap(*written))
    assert list(read_packets(path)) == written
    for cut in (1, 50):
        path.write_bytes(pcap(*written, cut=cut))
        assert list(read_packets(path)) == written[:1]


@pytest.mark.parametrize(
    ("data", "said"), [(b"", "too short"), (bytes(100), "not a capture"), (pcap(), "no TCP packet"), (None, "No such")]
)
def test_what_is_no_capture(tmp_path: Path, data: bytes | None, said: str) -> None:
    path = tmp_path / "x.pcap"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        capture(path)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, side = (tmp_path / f"{name}.pcap" for name in ("good", "bad", "side"))
    good.write_bytes(pcap(packet(5, KV, 7), packet(6, MODEL, 8)))
    side.write_bytes(pcap(packet(4, MODEL, 8)))
    bad.write_bytes(pcap(packet(5, KV, 7, tos=EXPEDITED_FORWARDING)))
    assert capture(good, [side]) == 0
    said = capsys.readouterr().out
    assert "EF (46)" in said and "Every byte is in its lane." in said and "1 packets of the high lane waited" in said
    assert capture(bad) == 1
    assert "WRONG LANE: 1,000 bytes of KV were sent in the high lane." in capsys.readouterr().out


def test_links_are_checked_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"no link 'pe0.cnc0' in this cluster \(did you mean 'pe0.cnic0'\?\)"):
        prepare(RunRequest(scenario="quickstart", capture=("pe0.cnc0",)))
    with pytest.raises(ConfigError, match="the sim world has no packets"):
        prepare(RunRequest(scenario="quickstart", capture=("pe0.cnic0",), world="sim"))
    chosen = ("pe0.cnic0", "pe0gpu0.cnic", "pe0.mem0", "de0.snic", "st0.snic", "pe0gpu0.copy")
    loaded = prepare(RunRequest(scenario="quickstart", capture=(*chosen, "pe0.cnic0")))
    assert loaded.plan.capture == chosen
