"""Injection of faults into a LocalWorld by name, seeded: one text describes a run, and replays it.

    python -m tests.simulation.inject 'dualpath 7 drop:PrefixLoaded:1'

replays system ``dualpath`` with seed 7, dropping the second PrefixLoaded. Several faults may follow each other.
``dualpath@ep`` has nodes of two GPUs, with collectives among those of a group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from emulators.agent_driver import Outcome
from testbed.protocol import machine as mc
from testbed.protocol import messages as m
from tests.support import faults as ft
from tests.support.leaks import leaks
from tests.support.local_world import ListScript, LocalWorld
from tests.support.worlds import COLLECTIVES, cluster, small_params

DEADLINE_NS = 200_000_000
LATE_NS = DEADLINE_NS + DEADLINE_NS // 2
MOST_DEADLINES = 25  # what the most patient state waits (the leader's), and the way there
TURNS = ((9, 5), (6, 1), (3, 5))
AGENTS = 2

MESSAGE_KINDS = sorted(
    kind.__name__ for kind in m.AnyMessage.__args__ if kind not in (m.Hello, m.FetchRequests, m.AbortRequest)
)
ROLES = ("scheduler", "index", "driver", "st0", "pe0", "de0", "pe0gpu0", "de1gpu0", "leader-pe0", "leader-de1")


def _abort(send: mc.Send) -> mc.Action:
    """The receiver alone is told to let go of the request."""
    return mc.Send(send.to, m.AbortRequest(m.requests_of(send.message)[0], "Injected"))


def _wrong_role(send: mc.Send) -> str:
    """A role of another kind than the one addressed, always the same for a kind of message."""
    others = [role for role in ROLES if role[:2] != send.to[:2] or len(role) != len(send.to)]
    return others[sum(type(send.message).__name__.encode()) % len(others)]


_ON_MESSAGES: dict[str, Callable[[mc.Send], list[mc.Action | ft.Fault]]] = {
    "drop": lambda send: [],
    "duplicate": lambda send: [send, send],
    "repeat-late": lambda send: [send, ft.Delayed(send, 3_000_000)],
    "reorder": lambda send: [ft.Delayed(send, 3_000_000)],
    "delay": lambda send: [ft.Delayed(send, LATE_NS)],
    "abort": lambda send: [send, _abort(send)],
    "abort-first": lambda send: [_abort(send), send],
    "misroute": lambda send: [mc.Send(_wrong_role(send), send.message)],
}
_ON_WRITES: dict[str, Callable[[mc.Write], list[mc.Action | ft.Fault]]] = {
    "refuse": lambda write: [ft.RefusedWrite(write)],
    "late": lambda write: [ft.LateWrite(write, LATE_NS)],
    "skip": lambda write: [ft.LostWrite(write)],
    "misplace": lambda write: [ft.MisplacedWrite(write)],
    "flip": lambda write: [ft.FlippedWrite(write)],
    "use-twice": lambda write: [ft.RepeatedWrite(write)],
}
_ON_FETCHES: dict[str, Callable[[mc.FetchBlock], list[mc.Action | ft.Fault]]] = {
    "stale": lambda fetch: [ft.StaleFetch(fetch)],
    "rot": lambda fetch: [ft.RottenFetch(fetch)],
    "unreadable": lambda fetch: [ft.FailedFetch(fetch)],
}
_ON_STORES: dict[str, Callable[[mc.StoreBlock], list[mc.Action | ft.Fault]]] = {
    "disk-full": lambda store: [ft.FailedStore(store)],
}
_ON_EXCHANGES: dict[str, Callable[[mc.Exchange], list[mc.Action | ft.Fault]]] = {
    "lose-shards": lambda exchange: [replace(exchange, shards=())],
    "repeat-shards": lambda exchange: [exchange, exchange],
    "late-shards": lambda exchange: [ft.Delayed(exchange, LATE_NS)],
}
# Hops of a write, by what its ends are: kind of the source role, then of the destination endpoint.
HOPS = ("st>snic", "snic>st", "pe.dram>hbm", "de.dram>hbm", "pe.hbm>dram", "de.hbm>dram")
KINDS = {
    "message": _ON_MESSAGES, "write": _ON_WRITES, "fetch": _ON_FETCHES, "store": _ON_STORES, "exchange": _ON_EXCHANGES,
}  # fmt: skip


def hop_of(role: str, write: mc.Write) -> str:
    """Which of the six hops of section 3 a write is."""
    if role.startswith("st"):
        return "st>snic"
    if write.ref.endpoint.startswith("st"):
        return "snic>st"
    side = role[:2]
    return f"{side}.hbm>dram" if "gpu" in role else f"{side}.dram>hbm"


@dataclass
class Injection:
    """One fault: ``what`` happens to the ``nth`` (from 0) action that ``where`` names; "*": to all of them."""

    what: str
    where: str
    nth: int | None
    seen: int = 0
    struck: int = 0

    @classmethod
    def parse(cls, text: str) -> Injection:
        """``what:where:nth``."""
        what, where, nth = text.split(":")
        if not any(what in table for table in KINDS.values()):
            raise SystemExit(f"unknown fault {what!r}")
        return cls(what, where, None if nth == "*" else int(nth))

    def apply(self, role: str, action: mc.Action | ft.Fault) -> list[mc.Action | ft.Fault]:
        """The action, or what the fault makes of it."""
        match action:
            case mc.Send() if self.what in _ON_MESSAGES and type(action.message).__name__ == self.where:
                return _ON_MESSAGES[self.what](action) if self._strikes() else [action]
            case mc.Write() if self.what in _ON_WRITES and hop_of(role, action) == self.where:
                return _ON_WRITES[self.what](action) if self._strikes() else [action]
            case mc.FetchBlock() if self.what in _ON_FETCHES:
                return _ON_FETCHES[self.what](action) if self._strikes() else [action]
            case mc.Exchange() if self.what in _ON_EXCHANGES and role.startswith(self.where):
                return _ON_EXCHANGES[self.what](action) if self._strikes() else [action]
            case mc.StoreBlock() if self.what in _ON_STORES:
                return _ON_STORES[self.what](action) if self._strikes() else [action]
        return [action]

    def _strikes(self) -> bool:
        self.seen += 1
        strikes = self.nth is None or self.seen == self.nth + 1
        self.struck += strikes
        return strikes


@dataclass
class FaultRun:
    """A run with faults, and what must hold of it whatever they are."""

    text: str
    world: LocalWorld = field(init=False)
    injections: list[Injection] = field(init=False)

    def __post_init__(self) -> None:
        system, seed, *faults = self.text.split()
        self.injections = [Injection.parse(f) for f in faults]
        system, _, expert_parallel = system.partition("@")
        params = small_params(
            wait_deadline_ns=DEADLINE_NS,
            fetch_interval_ns=10_000_000,
            dram_pages=24,
            stage_pages=2,
            de_hbm_pages=24,
            compute_quota_ns=3 * 6 * 1_000,  # six new tokens per forward: chunked prefill
            collectives=COLLECTIVES if expert_parallel else None,
        )
        scripts = [ListScript(f"a{i}", TURNS, seed=int(seed)) for i in range(AGENTS)]
        spec = cluster(prefill=1, decode=2, gpus=2 if expert_parallel else 1, storage=2)
        self.world = LocalWorld(spec, params, system, scripts, seed=int(seed), hook=self._hook)

    def _hook(self, role: str, action: mc.Action) -> list[mc.Action | ft.Fault]:
        actions: list[mc.Action | ft.Fault] = [action]
        for injection in self.injections:
            actions = [after for before in actions for after in injection.apply(role, before)]
        return actions

    @property
    def struck(self) -> int:
        """How often the faults have struck."""
        return sum(i.struck for i in self.injections)

    def check(self) -> list[Outcome]:
        """The contract. Result: the outcomes; errors are named in them.

        Raises:
            AssertionError: the contract does not hold; the message ends with the command that replays the run.
        """
        try:
            outcomes = self.world.run(limit=300_000)
            self.world.check_tokens()
            for o in outcomes:
                assert o.completed_ns, "a round without an end"
                assert not o.error or o.error_detail, "an error without a reason"
                assert o.completed_ns - o.submitted_ns < MOST_DEADLINES * DEADLINE_NS, f"{o.error} took too long"
            self.world.drain()
            left = leaks(self.world)
            assert left == [], "left behind: " + "; ".join(left)
        except Exception as error:
            command = f"python -m tests.simulation.inject '{self.text}'"
            raise AssertionError(f"{type(error).__name__}: {error}\nreplay: {command}") from error
        return outcomes


def errors_of(outcomes: list[Outcome]) -> Counter[str]:
    """Named errors and how often."""
    return Counter(o.error for o in outcomes if o.error)


if __name__ == "__main__":
    run = FaultRun(" ".join(sys.argv[1:]))
    for one in run.check():
        print(f"agent {one.agent} turn {one.turn}: {one.error or 'ok'} {one.error_detail}")
    print(f"faults struck {run.struck} times; the contract holds")
