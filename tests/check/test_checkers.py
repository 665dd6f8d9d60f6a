"""Checkers by themselves, and what they rest on: cells, named grants, copies, frozen states."""

from __future__ import annotations

from array import array

import pytest

from testbed.cli.check_cluster import load_config, setup_of
from testbed.fabric.check import inputs as i
from testbed.fabric.check.checkers import conservation, lane, progress, provenance, queues, tokens, visibility
from testbed.fabric.check.content import NOTHING, chain_of, expected_tokens, right_cells, token_of, vote
from testbed.fabric.check.memory import CellMemory
from testbed.fabric.check.role import GrantNames, Role, StructuralIssuer, make_role
from testbed.fabric.check.world import DELIVER, LOSE, CheckWorld, Move
from testbed.protocol import messages as m
from testbed.protocol.grants import GrantRef, Landing
from testbed.protocol.layout import BlockLayout
from testbed.protocol.machine import Write

LAYOUT = BlockLayout(model="check", layers=2, block_tokens=2, bytes_per_token_layer=1)
TOKENS = b"".join(t.to_bytes(4, "little") for t in (7, 8, 9))


def test_a_token_depends_on_every_cell_read() -> None:
    (right,) = expected_tokens(LAYOUT, TOKENS, 1)
    columns = [right_cells(LAYOUT, TOKENS, block, 3, range(2)) for block in range(2)]
    assert token_of(sum(vote([column[layer] for column in columns]) for layer in range(2))) == right
    for block in range(2):
        for layer in range(2):
            wrong = [list(column) for column in columns]
            wrong[block][layer] = NOTHING
            assert token_of(sum(vote([column[at] for column in wrong]) for at in range(2))) != right


def test_a_cell_is_named_by_the_key_of_its_block() -> None:
    import numpy as np

    keys = LAYOUT.keys(np.frombuffer(TOKENS, dtype="<u4"))
    assert [right_cells(LAYOUT, TOKENS, block, 3, range(1))[0][1] for block in range(2)] == list(keys)
    assert chain_of(TOKENS[:8], LAYOUT.fingerprint) == keys[0]


def test_provenance_names_the_block_that_landed_wrongly() -> None:
    landing = Landing(pieces=(0,), piece_bytes=4, keys=(5,), layer_begin=0, layer_end=2)
    assert list(provenance.at_landing(landing, [(0, 5, 2), (1, 5, 2)])) == []
    assert len(list(provenance.at_landing(landing, [(1, 5, 2), (0, 5, 2)]))) == 2
    assert "memory never written" in next(provenance.at_compute("it", 0, NOTHING, (0, 5, 2)))


def test_memory_read_by_a_write_in_flight_may_not_change() -> None:
    memory, wrong = CellMemory(2), list[str]()
    memory.write(4, ((0, 1, 2),), wrong)
    memory.reserve(4, 1, 1)
    memory.write(4, ((0, 1, 2),), wrong)
    assert wrong == []
    memory.write(4, ((0, 3, 2),), wrong)
    assert "changes while a write in flight reads it" in wrong[0]
    memory.reserve(4, 1, -1)
    assert memory.busy == {}


@pytest.mark.parametrize(
    ("via", "to", "says"),
    [
        ("pe0.cnic0", "de0.cnic0", ""),
        ("de0.cnic0", "pe0.cnic0", "not its own"),
        ("pe0.cnic0", "nowhere", "nobody owns"),
        ("pe0.cnic0", "st0.snic", "not on one network"),
        ("pe0.copy0", "pe0gpu0.copy", ""),
        ("pe0.copy0", "pe0gpu1.copy", "not on one network"),
        ("pe0.copy0", "de0.cnic0", "not on one network"),
    ],
)
def test_kv_stays_on_its_network(via: str, to: str, says: str) -> None:
    write = Write(1, GrantRef(to, 1, 1, 4), via, (0,), 4)
    everywhere = {"de0.cnic0", "st0.snic", "pe0.cnic0", "pe0gpu0.copy", "pe0gpu1.copy"}
    found = list(lane.at_write("pe0", ("pe0.cnic0", "pe0.snic", "pe0.copy0"), everywhere, write))
    assert (says in found[0]) if says else found == []


def test_visibility_asks_every_replica() -> None:
    disks = {"st0": {1}, "st1": set[int]()}
    assert list(visibility.at_publication([1], lambda key: ("st0",), disks)) == []
    assert "st1" in next(visibility.at_publication([1], lambda key: ("st0", "st1"), disks))


def test_a_livelock_is_what_reaches_no_end() -> None:
    # 0 -> 1 -> 3 (end); 0 -> 2 -> 4 -> 2
    sources, targets = array("q", [0, 1, 0, 2, 4]), array("q", [1, 3, 2, 4, 2])
    assert progress.unable_to_end(5, sources, targets, [3]) == [2, 4]
    assert progress.unable_to_end(5, sources, targets, [3, 2]) == []


def _role(name: str) -> Role:
    setup = setup_of(load_config("1p1d-1r"))
    return make_role(setup, next(d for d in setup.descriptions if d.name == name))


def test_what_is_left_at_rest_is_named() -> None:
    role = _role("de0")
    assert list(conservation.at_rest(role)) == []
    role.machine.buffer.take(2)
    role.machine.owners[5] = "0.0"
    role.deadlines["0.0"] = 1
    assert list(conservation.at_rest(role)) == [
        "de0.buffer: 2 of 16 pages are held",
        "de0.owners: 1 left",
        "de0: deadlines 0.0 are set",
    ]


def test_a_page_that_is_free_and_held_is_seen() -> None:
    role = _role("de0gpu0")
    assert list(conservation.of_role(role)) == []
    role.machine.hbm._free.append(role.machine.hbm.take(1)[0])
    assert "16 pages free, 1 held, of 16" in next(conservation.of_role(role))


def test_queues_and_channels_are_bounded() -> None:
    role = _role("de0")
    limits = queues.Limits(windows={"reading": 1}, rest=3, channel=2)
    assert list(queues.of_role("de0", role.machine, limits)) == []
    role.machine.reading = {1: None, 2: None}
    role.machine.persister._queue.extend(range(4))
    assert list(queues.of_role("de0", role.machine, limits)) == [
        "de0.reading holds 2, at most 1 are allowed",
        "de0._queue holds 4, at most 3 are allowed",
    ]
    assert list(queues.of_channel("a to b", 2, limits)) == []
    assert "carries 3" in next(queues.of_channel("a to b", 3, limits))


def test_a_token_emitted_twice_is_seen() -> None:
    role = _role("driver")
    role.step(i.Begin())
    emitted = m.TokensEmitted("0.0", 0, (5,))
    assert list(tokens.at_delivery("driver", role.machine, emitted)) == []
    step = role.step(i.Deliver("pe0gpu0", emitted))
    assert step.calm == []
    assert "token 0 of 0.0 is 5, which is wrong" in next(tokens.of_driver(role.machine, role.shared.expected))
    assert "a second time" in role.step(i.Deliver("pe0gpu0", emitted)).calm[0].text


def test_grants_are_named_by_what_they_are_for() -> None:
    names = GrantNames()
    first, second = StructuralIssuer(names, 1), StructuralIssuer(names, 1)
    one, other = (Landing(pieces=(k,), piece_bytes=1, keys=(k,), layer_begin=0, layer_end=1) for k in (1, 2))
    forth = [first.issue("de0", landing).grant_id for landing in (one, other, one)]
    back = [second.issue("de0", landing).grant_id for landing in (other, one, one)]
    assert len(set(forth)) == 3
    assert (forth[0], forth[1], forth[2]) == (back[1], back[0], back[2])


def test_a_copy_is_the_same_state_and_shares_nothing_that_changes() -> None:
    world = CheckWorld(setup_of(load_config("1p1d-1r")))
    state = world.initial(1)
    role = world.role_at(state.roles[world.index_of["driver"]])
    role.machine.contexts[0][0] += 1
    role.machine.records["0.0"].durable = True
    assert not world.role_at(state.roles[world.index_of["driver"]]).machine.records["0.0"].durable
    assert role.machine.params is world.role_at(state.roles[0]).machine.params


def test_a_fault_is_counted_and_excuses_what_follows() -> None:
    world = CheckWorld(setup_of(load_config("1p1d-1r")))
    state = world.initial(1)
    (channel, queue), *_ = state.flight
    lost, violations = world.apply(state, Move(LOSE, channel))
    assert violations == []
    assert (lost.left, lost.hurt, lost.roles) == (0, True, state.roles)
    assert len(lost.flight) == len(state.flight) - (len(queue) == 1)
    delivered, _ = world.apply(state, Move(DELIVER, channel))
    assert (delivered.left, delivered.hurt) == (1, False)
    assert delivered.roles != state.roles
