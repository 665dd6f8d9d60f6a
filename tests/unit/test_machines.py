"""What single machines owe their peers: bounded queues, refusals by name, no trust in stale reports."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from emulators.agent_driver import AgentDriver
from emulators.central_scheduler import CentralScheduler
from emulators.decode_engine import DecodeEngine
from emulators.dram_buffer import DramBuffer
from emulators.group_leader import GroupLeader
from emulators.kv_index import KvIndex
from emulators.prefill_engine import PrefillEngine
from emulators.storage_server import StorageServer
from testbed.errors import BugError
from testbed.ids import DRIVER
from testbed.protocol import machine as mc
from testbed.protocol import messages as m
from testbed.protocol.grants import GrantRef
from testbed.protocol.params import SYSTEMS, system_named
from testbed.protocol.plan import plan_cluster
from tests.support.local_world import FlatCost, ListScript
from tests.support.worlds import TINY, cluster, small_params

PLAN = plan_cluster(cluster(1, 1, 1, 2))
PE, DE = PLAN.groups


def _sent(actions: list[mc.Action], kind: type[m.Message]) -> list[m.Message]:
    return [a.message for a in actions if isinstance(a, mc.Send) and isinstance(a.message, kind)]


def _scheduler(**params: object) -> CentralScheduler:
    return CentralScheduler(PLAN, SYSTEMS["dualpath"], small_params(**params))  # type: ignore[arg-type]


def _submit(scheduler: CentralScheduler, request_id: str, prompt: int, generate: int = 1, hits: int = 0) -> None:
    tokens = np.arange(prompt, dtype="<u4").tobytes()
    scheduler.handle(mc.Received(DRIVER, m.SubmitRequest(request_id, tokens, generate)), 1)
    scheduler.handle(mc.Received("index", m.PrefixFound(request_id, hits)), 1)


def _report(group: str, serial: int, tokens: int = 0, free: int = 1000, queue: int = 0) -> mc.Event:
    kind, engine, node = ("pe", "pe0gpu0", "pe0") if group == PE.name else ("de", "de0gpu0", "de0")
    load = m.EngineLoad(engine, node, 0, tokens, free)
    return mc.Received("leader", m.FetchRequests(group, kind, serial, (load,), {node: queue}))


def test_a_report_older_than_an_assignment_does_not_hide_it() -> None:
    scheduler = _scheduler(beta_tokens=100, de_hbm_pages=64)
    for k in range(3):
        _submit(scheduler, f"r{k}", 60)
    chosen = _sent(scheduler.handle(_report(PE.name, serial=0), 2), m.EnginesChosen)
    assert [(c.serial, c.request_ids, c.tokens) for c in chosen] == [(1, ("r0", "r1"), (60, 60))]  # type: ignore[attr-defined]
    # The same report again, or another that the leader made before it was told: still 120 tokens, over beta.
    assert scheduler.handle(_report(PE.name, serial=0), 3) == []
    # The leader has counted them, and they have ended: there is room.
    chosen = _sent(scheduler.handle(_report(PE.name, serial=1), 4), m.EnginesChosen)
    assert [c.request_ids for c in chosen] == [("r2",)]  # type: ignore[attr-defined]


def test_reads_assigned_since_a_report_count_in_the_next_side_decision() -> None:
    scheduler = _scheduler(de_hbm_pages=64)
    for k in range(3):
        _submit(scheduler, f"r{k}", 41, hits=k + 5)
    scheduler.handle(_report(PE.name, serial=0), 2)
    assigned = _sent(scheduler.handle(_report(DE.name, serial=0), 3), m.RequestScheduled)
    # r0: 0 and 0, a tie: pe. r1: 20 and 0: de. r2: 20 and 24: pe.
    assert [a.read_side for a in assigned] == ["pe", "de", "pe"]  # type: ignore[attr-defined]
    _submit(scheduler, "r3", 41, hits=1)
    scheduler.handle(_report(PE.name, serial=1), 4)  # serial 1 reserved; the reads were told in 2 to 4
    assert scheduler.read_queues == {"pe0": 20 + 28, "de0": 24}
    scheduler.handle(_report(PE.name, serial=4), 4)
    assert scheduler.read_queues["pe0"] == 0  # the leader knows them, and says that they are read


def test_a_split_read_counts_in_both_queues_until_its_node_has_read_its_share() -> None:
    split, params = system_named("dualpath-split"), small_params(de_hbm_pages=64)
    scheduler, leaders = CentralScheduler(PLAN, split, params), [GroupLeader(g, params) for g in (PE, DE)]
    _submit(scheduler, "r0", 41, hits=7)
    scheduler.handle(_report(PE.name, serial=0), 2)
    actions = scheduler.handle(_report(DE.name, serial=0, queue=12), 3)
    (told,) = _sent(actions, m.RequestScheduled)
    assert isinstance(told, m.RequestScheduled)
    assert (told.read_side, told.hit_tokens, told.de_hit_tokens) == ("split", 28, 8)  # 0 + 5 blocks, 3 + 2 blocks
    assert scheduler.read_queues == {"pe0": 20, "de0": 12 + 8}
    for leader, node, tokens in zip(leaders, ("pe0", "de0"), (20, 8), strict=True):
        (assigned,) = (a.message for a in actions if isinstance(a, mc.Send) and a.to == leader.role)
        for message, queue in ((assigned, tokens), (m.ReadFinished("r0", node), 0)):
            leader.handle(mc.Received("x", message), 3)
            (report,) = _sent(leader.handle(mc.DeadlinePassed("fetch"), 4), m.FetchRequests)
            assert report.read_queues == {node: queue}  # type: ignore[attr-defined]


def test_a_request_given_up_half_chosen_is_uncounted_at_its_leader() -> None:
    scheduler = _scheduler()
    _submit(scheduler, "r0", 8)
    scheduler.handle(_report(PE.name, serial=0), 2)
    actions = scheduler.handle(mc.DeadlinePassed("r0"), scheduler.records["r0"].deadline_ns)
    assert [a.to for a in actions if isinstance(a, mc.Send) and isinstance(a.message, m.AbortRequest)] == [PE.leader]
    assert scheduler.handle(_report(DE.name, serial=0), 3) == []


def test_leader_reports_what_its_engines_and_nodes_have_left() -> None:
    params = small_params()
    leader, capacity = GroupLeader(DE, params), params.de_hbm_pages * TINY.block_tokens
    half, whole = _assignment("r1", 12), _assignment("r2", 8)
    whole = msgspec.structs.replace(whole, hit_blocks=1, de_blocks=1)

    def report() -> tuple[int, int, int, int, int]:
        (fetch,) = _sent(leader.handle(mc.DeadlinePassed("fetch"), 1), m.FetchRequests)
        assert isinstance(fetch, m.FetchRequests)
        (load,) = fetch.engines
        return fetch.serial, load.sequences, load.tokens, capacity - load.free_hbm_tokens, fetch.read_queues["de0"]

    def told(message: m.Message) -> None:
        leader.handle(mc.Received("x", message), 1)

    assert report() == (0, 0, 0, 0, 0)
    told(m.EnginesChosen(1, ("r1",), ("de0gpu0",), (14,), (16,)))
    assert report() == (1, 1, 14, 16, 0)
    told(m.RequestsAssigned(2, (whole,)))
    assert report() == (2, 2, 14 + 10, 16 + 12, 4)
    told(m.RequestsAssigned(3, (half,)))  # counted since it was chosen
    assert report() == (3, 2, 14 + 10, 16 + 12, 4)
    told(m.ReadFinished("r2", "de0"))
    assert report() == (3, 2, 14 + 10, 16 + 12, 0)
    told(m.RequestReleased("r2", "de0gpu0"))
    assert report() == (3, 1, 14, 16, 0)
    told(m.AbortRequest("r1", "x"))
    assert report() == (3, 0, 0, 0, 0)


def test_free_hbm_falls_below_zero_when_more_is_assigned_than_there_is() -> None:
    leader = GroupLeader(DE, small_params(de_hbm_pages=4))
    for k in range(2):  # as round robin does: three blocks each
        leader.handle(mc.Received("scheduler", m.RequestsAssigned(k + 1, (_assignment(f"r{k}"),))), 1)
    (fetch,) = _sent(leader.handle(mc.DeadlinePassed("fetch"), 1), m.FetchRequests)
    assert [e.free_hbm_tokens for e in fetch.engines] == [(4 - 6) * TINY.block_tokens]  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", ["pe", "de"])
def test_hbm_counts_from_the_assignment_on_though_prompts_are_still_in_prefill(first: str) -> None:
    plan, params = plan_cluster(cluster(1, 1, 2, 2)), small_params(de_hbm_pages=5)
    scheduler = CentralScheduler(plan, SYSTEMS["dualpath"], params)
    leaders = {g.leader: GroupLeader(g, params) for g in sorted(plan.groups, key=lambda g: g.kind.value != first)}

    def turn() -> list[str]:
        """Both groups fetch once, and are told what comes of it: the DEs that were given a request."""
        given: list[str] = []
        for name, leader in leaders.items():
            (fetch,) = _sent(leader.handle(mc.DeadlinePassed("fetch"), 2), m.FetchRequests)
            for action in scheduler.handle(mc.Received(name, fetch), 2):
                if isinstance(action, mc.Send) and action.to in leaders:
                    answer = leaders[action.to].handle(mc.Received("scheduler", action.message), 2)
                    given += [a.to for a in answer if isinstance(a, mc.Send) and isinstance(a.message, m.AssignDecode)]
        return given

    # Three, two and two blocks, by tokens: 13 on gpu0, 6 + 6 on gpu1. No DE takes HBM meanwhile.
    for request_id, prompt, generate, engine in (("r0", 11, 2, 0), ("r1", 5, 1, 1), ("r2", 5, 1, 1)):
        _submit(scheduler, request_id, prompt, generate)
        assert turn() == [f"de0gpu{engine}"]
    assert turn() == []  # the last reports acknowledge all that was assigned
    assert [len(t) for t in scheduler._told.values()] == [0, 0]
    _submit(scheduler, "r3", 5)  # two blocks: gpu1 has the fewest tokens, but one block left
    assert turn() == ["de0gpu0"]
    _submit(scheduler, "r4", 5)
    assert turn() == turn() == []  # both are full: it waits
    leaders[plan.leader_of("de0gpu1")].handle(mc.Received("de0gpu1", m.RequestReleased("r1", "de0gpu1")), 3)
    assert turn() == ["de0gpu1"]


def test_what_no_engine_can_hold_is_refused_where_it_is_submitted() -> None:
    scheduler = _scheduler(de_hbm_pages=2)
    for request_id, prompt, generate, error in (
        ("r0", 8, 2, "HbmTooSmall"),
        ("r1", 0, 1, "EmptyRequest"),
        ("r2", 3, 0, "EmptyRequest"),
    ):
        tokens = np.arange(prompt, dtype="<u4").tobytes()
        actions = scheduler.handle(mc.Received(DRIVER, m.SubmitRequest(request_id, tokens, generate)), 1)
        assert [f.error for f in _sent(actions, m.RequestFailed)] == [error]  # type: ignore[attr-defined]
    _submit(scheduler, "r3", 8, 1)  # exactly fits
    assert list(scheduler.records) == ["r3"]


def test_a_group_that_does_not_exist_assigns_nothing() -> None:
    scheduler = _scheduler()
    _submit(scheduler, "r0", 8)
    assert scheduler.handle(mc.Received("x", m.FetchRequests("nobody", "pe", 0, (), {})), 2) == []
    assert scheduler.strays == 1


def test_early_messages_are_bounded_and_dropped() -> None:
    params = small_params(queue_limit=5)
    engine = PrefillEngine("pe0gpu0", "leader-pe0", SYSTEMS["dualpath"], params, FlatCost())
    failed = 0
    for k in range(9):
        for _ in range(12):
            actions = engine.handle(mc.Received("de0", m.BufferReserved(f"r{k}")), 1)
            failed += len(_sent(actions, m.RequestFailed))
    assert len(engine._early) == 5
    assert sum(map(len, engine._early.values())) == 5 * 8
    assert failed == 9 * 12 - 5 * 8  # the others are refused by name
    for k in range(5):
        engine.handle(mc.DeadlinePassed(f"early/r{k}"), params.wait_deadline_ns + 1)
    assert not engine._early


def test_an_abort_that_overtakes_the_assignment_frees_the_leader() -> None:
    args = (SYSTEMS["dualpath"], small_params(), FlatCost())
    engines = (PrefillEngine("pe0gpu0", "leader-pe0", *args), DecodeEngine("de0gpu0", "leader-de0", *args))
    messages = (m.BufferReserved("r0"), m.PrefillFinished("r0", 5))
    assignments = (m.AssignPrefill(_assignment("r0")), m.AssignDecode(_assignment("r0")))
    for engine, message, assignment in zip(engines, messages, assignments, strict=True):
        engine.handle(mc.Received("x", message), 1)
        actions = engine.handle(mc.Received("de0", m.AbortRequest("r0", "Injected")), 1)
        assert mc.ClearDeadline("early/r0") in actions and not engine._early
        actions = engine.handle(mc.Received(engine.leader, assignment), 2)
        assert actions == [mc.Send(engine.leader, m.RequestReleased("r0", engine.role))]
        assert not engine.records


def test_a_decode_step_keeps_the_pages_that_it_reads() -> None:
    engine = DecodeEngine("de0gpu0", "leader-de0", SYSTEMS["dualpath"], small_params(), FlatCost())
    engine.handle(mc.Received("leader-de0", m.AssignDecode(_assignment("r0"))), 1)
    engine.handle(mc.Received("de0", m.PromptBuffered("r0")), 1)
    actions = engine.handle(mc.Received("pe0gpu0", m.PrefillFinished("r0", 5)), 1)
    (grant,) = (a.ref.grant_id for a in actions if isinstance(a, mc.OpenGrant))
    (step,) = (a for a in engine.handle(mc.WriteLanded(grant), 1) if isinstance(a, mc.ComputeDecode))
    engine.handle(mc.Received("de0", m.AbortRequest("r0", "Injected")), 1)
    assert engine.hbm.used == len(step.items[0].pages) == 3  # in flight, though the request is gone
    engine.handle(mc.ComputeFinished(step.compute_id, {"r0": 6}), 2)
    assert engine.hbm.used == 0


def _assignment(request_id: str, prompt: int = 8) -> m.Assignment:
    ids = np.arange(prompt, dtype="<u4")
    return m.Assignment(request_id, ids.tobytes(), TINY.keys(ids), 0, 2, 0, 0, "pe0gpu0", "de0gpu0", "pe0", "de0")


def test_a_round_given_up_before_it_was_scheduled_is_let_go_of_then() -> None:
    driver = AgentDriver([ListScript("a", [(4, 2)])], [0], small_params())
    driver.handle(mc.Started(), 0)
    deadline_ns = driver.records["0.0"].deadline_ns
    driver.handle(mc.DeadlinePassed("0.0"), deadline_ns)
    assert driver.outcomes[0].error == "AgentDriverSubmittedTimedOut" and driver.finished
    actions = driver.handle(mc.Received("scheduler", m.RequestScheduled("0.0", "none", 0, 0, "pe0gpu0", "de0gpu0")), 1)
    assert {a.to for a in actions if isinstance(a, mc.Send)} == {"pe0gpu0", "de0gpu0", "pe0", "de0"}
    assert len(_sent(actions, m.AbortRequest)) == 4


def test_the_next_round_waits_for_the_tool() -> None:
    driver = AgentDriver([ListScript("a", [(4, 1), (4, 1)])], [0], small_params(), tool_delay_ns=50)
    driver.handle(mc.Started(), 0)
    driver.handle(mc.Received("pe0gpu0", m.TokensEmitted("0.0", 0, (5,))), 9)
    actions = driver.handle(mc.Received("de0gpu0", m.RequestCompleted("0.0")), 10)
    assert not _sent(actions, m.SubmitRequest) and not driver.finished
    assert mc.SetDeadline("arrival/0.1", 60) in actions
    actions = driver.handle(mc.DeadlinePassed("arrival/0.1"), 60)
    assert [s.request_id for s in _sent(actions, m.SubmitRequest)] == ["0.1"]  # type: ignore[attr-defined]
    assert driver.outcomes[1].submitted_ns == 60


@pytest.mark.parametrize(("first", "tokens"), [(0, (7,)), (1, (9, 9)), (-1, (5,)), (2, (1,))])
def test_driver_refuses_tokens_that_cannot_be(first: int, tokens: tuple[int, ...]) -> None:
    driver = AgentDriver([ListScript("a", [(4, 2)])], [0], small_params())
    driver.handle(mc.Started(), 0)
    driver.handle(mc.Received("pe0gpu0", m.TokensEmitted("0.0", 0, (5,))), 1)
    driver.handle(mc.Received("pe0gpu0", m.TokensEmitted("0.0", 0, (5,))), 9)  # a repeat
    assert driver.outcomes[0].first_token_ns == 1
    driver.handle(mc.Received("de0gpu0", m.TokensEmitted("0.0", first, tokens)), 2)
    assert driver.outcomes[0].error == "WrongTokenCount"
    assert driver.outcomes[0].tokens[0] == 5


def test_dram_refuses_a_prompt_that_it_can_never_hold() -> None:
    dram = DramBuffer("de0", PLAN, small_params(dram_pages=1))
    actions = dram.handle(mc.Received("de0gpu0", m.ReserveBuffer(_assignment("r0"))), 1)
    assert [f.error for f in _sent(actions, m.RequestFailed)] == ["DramTooSmall"]  # type: ignore[attr-defined]
    assert not dram.records and not dram.waiting and dram.buffer.used == 0


def test_storage_stores_a_block_once_at_a_time_and_bounds_its_queues() -> None:
    server = StorageServer("st0", small_params(storage_pages=1, queue_limit=2))
    block = m.PersistBlock("r0", 5)
    assert len(_sent(server.handle(mc.Received("de0", block), 1), m.PersistOpened)) == 1
    assert server.handle(mc.Received("de0", block), 1) == []  # a repeat
    for key in (6, 7):
        assert server.handle(mc.Received("de0", m.PersistBlock("r0", key)), 1) == []  # waits for the page
    refused = _sent(server.handle(mc.Received("de0", m.PersistBlock("r0", 8)), 1), m.BlockNotStored)
    assert [(r.key, r.reason) for r in refused] == [(8, "write queue full")]  # type: ignore[attr-defined]
    reads = [m.ReadBlock("r0", key, GrantRef("de0.snic", key, 1, 96)) for key in range(4)]
    answers = [server.handle(mc.Received("de0", read), 1) for read in reads]
    assert [bool(_sent(a, m.BlockUnreadable)) for a in answers] == [False, False, False, True]


@pytest.mark.parametrize("machine", [StorageServer("st0", small_params()), KvIndex()])
def test_storage_and_index_refuse_by_name_and_live_on(machine: StorageServer | KvIndex) -> None:
    actions = machine.handle(mc.Received("de0", m.SkipPrompt("r0")), 1)
    assert [(f.request_id, f.error) for f in _sent(actions, m.RequestFailed)] == [("r0", "UnexpectedMessage")]  # type: ignore[attr-defined]
    assert machine.handle(mc.Received("de0", m.Hello("x", 1, 1)), 1) == []
    assert machine.handle(mc.Received("de0", m.AbortRequest("r0", "x")), 1) == []
    assert machine.strays == 2
    with pytest.raises(BugError, match="ComputeFinished is not for this kind of role"):
        machine.handle(mc.ComputeFinished(1, {}), 1)


def test_own_worlds_events_for_another_role_are_bugs() -> None:
    dram = DramBuffer("de0", PLAN, small_params())
    engine = PrefillEngine("pe0gpu0", "leader-pe0", SYSTEMS["dualpath"], small_params(), FlatCost())
    for machine in (dram, engine):
        with pytest.raises(BugError, match="BlockFetched is not for this kind of role"):
            machine.handle(mc.BlockFetched(1, 1), 1)
        assert machine.handle(mc.DeadlinePassed("gone"), 1) == []  # of a request that has just ended
