"""Which inputs of a role decide something that another, still to come, could decide otherwise.

One rule per kind of role, with the reason. An input that races is tried in every order; the others are taken at once
(reduction.py). What a rule needs to know of a role's state is looked up once per state.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.fabric.check import inputs as i
from testbed.fabric.check.world import CheckWorld, State
from testbed.ids import DRIVER, INDEX, SCHEDULER
from testbed.protocol import messages as m

PREFILL, DECODE, NODE, LEADER, STORAGE = "prefill engine", "decode engine", "node", "leader", "storage server"
_ADMISSIONS = frozenset({"BufferReserved", "PrefixLoaded"})
_MEMORY = {
    PREFILL: frozenset({"Ended"}),
    DECODE: frozenset({"PromptBuffered", "PrefillFinished", "BlockSettled", "Ended"}),
    NODE: frozenset(
        {"ReserveBuffer", "LoadPrefix", "StageBlock", "PrefixReleased", "RequestReleased", "SkipPrompt", "Ended", "NIC"}
    ),
    STORAGE: frozenset({"ReadBlock", "PersistBlock", "Ended", "disk"}),
}
"""Inputs that take or give back memory or room in a window."""
_COUNTS = {
    LEADER: frozenset({"ReadFinished", "RequestReleased"}),
    DRIVER: frozenset({"RequestScheduled"}),
}
"""Inputs that change nothing but a figure or a note, and that come behind nothing else on their channel."""


def kind_of_role(name: str) -> str:
    """What kind of role a name is."""
    if name in (INDEX, SCHEDULER, DRIVER):
        return name
    if name.startswith("leader-"):
        return LEADER
    if name.startswith("st"):
        return STORAGE
    side = PREFILL if name.startswith("pe") else DECODE
    return side if "gpu" in name else NODE


def kind_of_input(given: i.Input) -> str:
    """What kind of input: the message, or what ends."""
    match given:
        case i.Deliver():
            return type(given.message).__name__
        case i.Finish():
            return given.lane.split(" ", 1)[0]
    return type(given).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What rules ask of one role's state."""

    past: frozenset[str]
    """PE: requests that are runnable or beyond. DE: requests that decode or are beyond."""
    alive: frozenset[str]
    """Driver: requests under way."""
    more: bool
    """Driver: another request will follow. Scheduler: some look-up is out."""
    chunked: bool
    """PE: some prompt takes more than one forward, so that it becomes runnable again."""
    early: bool
    """PE: some message has overtaken its assignment, which then admits at once."""
    ended: frozenset[str]
    """Requests that have ended here."""


class Races:
    """The rules, applied to one state at a time."""

    def __init__(self, world: CheckWorld) -> None:
        self._world = world
        self._roomy, self._caching = world.setup.roomy, world.setup.caching
        self._kinds = [kind_of_role(name) for name in world.names]
        self._driver, self._scheduler = world.index_of[DRIVER], world.index_of[SCHEDULER]
        self._known: dict[int, _Known] = {}
        self._names: list[str] = []
        self._submissions = -1
        self._roles: tuple[int, ...] = ()
        self._alive: frozenset[str] = frozenset()
        self._unassigned = self._looking = False

    def look_at(self, state: State) -> None:
        """Rules are about this state from now on."""
        driver, scheduler = state.roles[self._driver], state.roles[self._scheduler]
        self._roles = state.roles
        news = self._of(driver)
        self._alive = news.alive
        submitting = news.more or any(self._world.channels[c].source == DRIVER for c, _ in state.flight)
        self._unassigned = submitting or self._world.locals[scheduler].waiting
        self._looking = submitting or self._of(scheduler).more

    def is_dead(self, role: int, given: int) -> bool:
        """Whether an input is about requests that have ended at its role, and changes nothing."""
        arrived = self._world.inputs[given]
        if not isinstance(arrived, i.Deliver):
            return False
        local = self._roles[role]
        requests = m.requests_of(arrived.message)
        if not requests or not self._of(local).ended.issuperset(requests):
            return False
        done = self._world.transition(local, given)
        return done.after == local and not done.outputs

    def only_counts(self, role: int, given: int) -> bool:
        """Whether an input only changes what its role counts or notes, so that nothing else waits for it."""
        counted = _COUNTS.get(self._kinds[role], frozenset())
        return self._named(given) in counted and not self._world.transition(self._roles[role], given).outputs

    def may_race(self, role: int, given: int) -> bool:
        """Whether an input of a role must be tried before and after all others of that role."""
        kind, what = self._kinds[role], self._named(given)
        crowded = len(self._alive) > 1
        if kind == LEADER:  # its reports tell what it has counted so far
            return self._unassigned
        if kind == INDEX:  # a look-up sees a publication or does not
            return self._looking
        if kind == SCHEDULER:  # queued in time for a report, or not
            return what in ("PrefixFound", "FetchRequests")
        if kind == DRIVER:  # a request ends before its agent hears of it; or a turn is sent before another agent's
            turns = crowded and bool(self._world.transition(self._roles[role], given).outputs)
            return turns or what == "RequestScheduled"
        if self._caching and kind == NODE and what in _MEMORY[NODE]:  # what an ended request leaves serves the next
            return True
        if not crowded:
            return False
        if not self._roomy and what in _MEMORY.get(kind, ()):
            return True
        return self._engine_races(role, kind, what)

    def _engine_races(self, role: int, kind: str, what: str) -> bool:
        known = self._of(self._roles[role])
        outside = len(self._alive - known.past)
        if kind == PREFILL:  # who is first, and who is in a forward together
            admits = what in _ADMISSIONS or what == "GPU" or (what == "AssignPrefill" and known.early)
            return admits and (outside > 1 or known.chunked)
        if kind == DECODE:  # a sequence joins before a step or after it
            return what in ("NIC", "GPU") and outside > (what == "NIC")
        return False

    def _named(self, given: int) -> str:
        names = self._names
        while len(names) <= given:
            names.append(kind_of_input(self._world.inputs[len(names)]))
        return names[given]

    def _of(self, local: int) -> _Known:
        known = self._known.get(local)
        if known is None:
            known = self._known[local] = self._looked_up(local)
        return known

    def _looked_up(self, local: int) -> _Known:
        kind = self._kinds[self._world.locals[local].role]
        machine = self._world.role_at(local).machine
        records = getattr(machine, "records", {})
        more = chunked = False
        past: set[str] = set()
        if kind == DRIVER:
            current = [record.outcome for record in records.values()]
            more = any(o.turn + 1 < machine.scripts[o.agent].turns for o in current)
        elif kind == SCHEDULER:
            more = any(record.state.name == "LOOKING_UP" for record in records.values())
        elif kind in (PREFILL, DECODE):
            beyond = ("RUNNABLE", "RUNNING", "FLUSHING") if kind == PREFILL else ("DECODING", "DRAINING")
            past = {*machine._ended, *(r for r, record in records.items() if record.state.name in beyond)}
            if kind == PREFILL and machine.forward is not None:
                ends = [
                    (p.assignment.prompt_tokens, c.cached_tokens + c.new_tokens) for p, c, _ in machine.forward.items
                ]
                chunked = any(end < tokens for tokens, end in ends)
        alive = frozenset(records) if kind == DRIVER else frozenset()
        return _Known(
            past=frozenset(past),
            alive=alive,
            more=more,
            chunked=chunked,
            early=bool(getattr(machine, "_early", ())),
            ended=frozenset(getattr(machine, "_ended", ())),
        )
