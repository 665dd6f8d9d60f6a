"""The contract under faults: right tokens or a named error within the deadline, and nothing left behind.

A failing case prints the one command that replays it.
"""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from emulators.agent_driver import Outcome
from emulators.dram_buffer import DramBuffer
from testbed.protocol import machine as mc
from testbed.protocol import messages as m
from testbed.protocol.params import system_named
from tests.simulation.inject import AGENTS, HOPS, KINDS, MESSAGE_KINDS, TURNS, FaultRun, errors_of
from tests.support import faults as ft
from tests.support.worlds import SERVED

NAMED = re.compile(
    r"(AgentDriver|CentralScheduler|GroupLeader|DramBuffer|PrefillEngine|DecodeEngine)[A-Za-z]+TimedOut$"
    r"|(WriteRefused|WrongBlockLanded|BlockUnreadable|UnexpectedMessage|Aborted)$"
)
# Kinds that only a run with another fault has, and that fault.
PRECONDITION = {
    "BlockNotStored": "disk-full:disk:*",
    "BlockUnreadable": "unreadable:disk:0",
    "RequestFailed": "unreadable:disk:0",
    "AbortRequest": "unreadable:disk:0",
}


def run(text: str) -> FaultRun:
    """Run, check the contract, and that the faults struck and every error is one of those that have a name."""
    case = FaultRun(text)
    errors = errors_of(case.check())
    assert case.injections[-1].struck, f"{text}: nothing was injected"
    assert all(NAMED.match(error) for error in errors), errors
    return case


def errors(case: FaultRun) -> set[str]:
    """Names of the errors of a checked run."""
    return set(errors_of(case.world.driver.outcomes))


def _seed(text: str) -> int:
    return sum(text.encode()) % 97


MESSAGE_CASES = [
    (what, kind)
    for what in ("drop", "duplicate", "repeat-late", "abort")
    for kind in (*MESSAGE_KINDS, "AbortRequest")
    if (what, kind) != ("abort", "AbortRequest")  # the same as a duplicate
]


@pytest.mark.parametrize(("what", "kind"), MESSAGE_CASES)
def test_message(what: str, kind: str) -> None:
    cause = PRECONDITION.get(kind, "")
    nth = 0 if cause else _seed(kind) % 2
    case = run(f"dualpath {_seed(what + kind)} {cause} {what}:{kind}:{nth}")
    if what in ("duplicate", "repeat-late"):
        harmless = {"BlockUnreadable"} if cause.startswith("unreadable") else set()
        assert errors(case) == harmless
        if not cause:
            _check_hits(case)


def _check_hits(case: FaultRun) -> None:
    """Nothing was given up on the way to storage: every turn hits all full blocks of the one before."""
    block = case.world.layout.block_tokens
    for agent in range(AGENTS):
        rounds = [o for o in case.world.driver.outcomes if o.agent == agent]
        assert len(rounds) == len(TURNS)
        for before, after in pairwise(rounds):
            assert after.hit_tokens == (before.prompt_tokens + before.generate_tokens - 1) // block * block


@pytest.mark.parametrize("what", ["delay", "reorder", "misroute", "abort-first"])
def test_messages_of_any_kind(what: str) -> None:
    rng = random.Random(what)
    for kind in rng.sample([k for k in MESSAGE_KINDS if k not in PRECONDITION], 6):
        run(f"dualpath {rng.randrange(100)} {what}:{kind}:{rng.randrange(2)}")


DETECTED = {"misplace", "flip"}


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize("what", KINDS["write"])
def test_write(what: str, hop: str) -> None:
    case = run(f"dualpath {_seed(what + hop)} {what}:{hop}:1")
    if what == "use-twice":
        assert errors(case) == set()
        assert any("is not open" in reason for reason in case.world.refusals)
    elif what in DETECTED:
        assert any("seal mismatch" in reason for reason in case.world.refusals)
        # A block that cannot be written back is given up: a hit less, no error.
        assert errors(case) <= set() if hop == "snic>st" else errors(case) & {"WriteRefused", "WrongBlockLanded"}
    elif hop == "snic>st":
        assert errors(case) == set()
    elif what != "late":  # late may be early enough
        assert errors(case), "a write that is missing cannot go unnoticed"


def test_write_after_its_grant_was_closed_is_refused_where_it_lands() -> None:
    case = run("dualpath 5 late:pe.hbm>dram:1")
    assert any("is not open" in reason for reason in case.world.refusals)
    assert errors(case)


@pytest.mark.parametrize("what", KINDS["fetch"])
@pytest.mark.parametrize("system", [name for name in SERVED if system_named(name).moves_kv])
def test_storage_serves_what_it_should_not(what: str, system: str) -> None:
    case = run(f"{system} 3 {what}:disk:1")
    assert errors(case) == {"BlockUnreadable" if what == "unreadable" else "WrongBlockLanded"}


@pytest.mark.parametrize("nth", [2, 3])  # one half of a request, or the other
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("drop:PrefixLoaded", "PrefillEngineReadingTimedOut"),
        ("repeat-late:PrefixLoaded", ""),
        ("duplicate:LoadLayers", ""),
        ("unreadable:disk", "BlockUnreadable"),
        ("misplace:st>snic", "WrongBlockLanded"),
        ("misplace:pe.dram>hbm", "WrongBlockLanded"),
        ("misplace:de.dram>hbm", "WrongBlockLanded"),
        ("misplace:pe.hbm>dram", "WrongBlockLanded"),
        ("skip:st>snic", "DramBufferReadingTimedOut"),
    ],
)
def test_one_half_of_a_split_read_ends_the_request_by_name_or_nothing(fault: str, error: str, nth: int) -> None:
    case = run(f"dualpath-split 3 {fault}:{nth}")
    assert errors(case) <= ({error, "WriteRefused"} if error else set())  # which end of a write tells first is chance
    assert bool(errors(case)) == bool(error)
    assert {"split"} <= {o.read_side for o in case.world.driver.outcomes}


def test_a_full_disk_costs_hits_and_nothing_else() -> None:
    case = run("dualpath 4 disk-full:disk:*")
    assert errors(case) == set()
    assert {o.hit_tokens for o in case.world.driver.outcomes} == {0}
    healthy = FaultRun("dualpath 4")
    assert any(o.hit_tokens for o in healthy.check())


def test_block_made_visible_before_it_is_durable() -> None:
    """The DRAM tells the index when it asks for room, and the disk is full then: a hit on nothing must not pass."""
    case = FaultRun("dualpath 6 disk-full:disk:*")
    inner, told = case._hook, set[int]()

    def hook(role: str, action: mc.Action) -> list[mc.Action | ft.Fault]:
        actions = inner(role, action)
        match action:
            case mc.Send(message=m.PersistBlock() as block) if block.key not in told:
                told.add(block.key)
                machine = case.world.roles[role].machine
                assert isinstance(machine, DramBuffer)
                job = machine.persister._active[block.request_id, block.key]
                actions.append(mc.Send("index", m.PublishBlock(block.request_id, block.key, job.parent)))
        return actions

    case.world._hook = hook
    case.check()
    assert told
    assert errors(case) == {"BlockUnreadable"}


@pytest.mark.parametrize("seed", range(30))
def test_any_two_faults(seed: int) -> None:
    rng = random.Random(seed)
    faults = [_random_fault(rng) for _ in range(2)]
    system = rng.choice(["basic", "layerwise", "dual-path-rr", "dualpath", "dualpath-split"])
    case = FaultRun(f"{system} {rng.randrange(1000)} {' '.join(faults)}")
    assert all(NAMED.match(error) for error in errors_of(case.check()))


WEIGHTS = {"message": 55, "write": 30, "fetch": 10, "store": 5}  # no exchanges: these systems have none


def _random_fault(rng: random.Random) -> str:
    table = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
    where = {"message": MESSAGE_KINDS, "write": HOPS}.get(table, ["disk"])
    return f"{rng.choice(list(KINDS[table]))}:{rng.choice(where)}:{rng.choice([0, 1, 2, 3, 5, 8, 13])}"


def test_a_world_without_faults_is_as_it_should_be() -> None:
    """The bench itself: no faults, no errors, and a replay is the same to the last token and nanosecond."""
    first, second = FaultRun("dualpath 9"), FaultRun("dualpath 9")
    assert errors_of(first.check()) == {}
    second.check()
    assert first.world.now_ns == second.world.now_ns
    assert first.world.driver.outcomes == second.world.driver.outcomes


def test_a_failure_prints_the_command_that_replays_it() -> None:
    case = FaultRun("dualpath 1 drop:PrefixLoaded:0")
    case.world.driver.outcomes.append(Outcome(agent=0, turn=0, prompt_tokens=1, generate_tokens=1, submitted_ns=0))
    with pytest.raises(AssertionError, match=r"replay: python -m tests\.simulation\.inject 'dualpath 1 drop:Pref"):
        case.check()
