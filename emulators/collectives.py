"""One engine's part in the collectives of its group: rounds, parts and barriers (paper 5, 8.5).

All engines of a group go through forward (or decode step) number n together, part by part::

    IDLE -> LOCAL -> DISPATCH -> EXPERTS -> COMBINE -> LOCAL ... -> IDLE
            own batch  barrier    mean of    barrier    next part
                                  the group

An engine with a batch enters when its batch is ready; one without is called in by a peer's first shard, and goes
through all parts with 0 tokens. Attention that takes longer on one engine is a wait for all: bubbles come by
themselves.

Invariants: a peer is at most one collective ahead, because it has had the own shard of the one before; so at most two
collectives' shards are held per peer. A barrier has a deadline: who is not heard of by then is not waited for in the
rest of the round, and an engine that its group went on without catches up, without waiting. The next round finds all
together again.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from testbed.errors import PeerError
from testbed.protocol.collectives import Collectives, Part
from testbed.protocol.machine import (
    ClearDeadline,
    Compute,
    Exchange,
    ExchangeTag,
    Outbox,
    SetDeadline,
    ShardArrived,
)
from testbed.protocol.shards import shard_wire_bytes
from testbed.units import NS_PER_S

DEADLINE = "collective"
"""Key of the deadline of a barrier."""
EXPERTS_ID = 0
"""Compute id of the experts' time: the ids of an engine's own computes start at 1, and one is out at a time."""
_EXTENSION = 4
"""A barrier's deadline is extended once, by this part of it."""
_HELD_ROUNDS = 4096
"""Rounds whose attention time is remembered; beyond, every other one is."""
_DIGITS, _STRETCH_DIGITS = 8, 11
"""Significant bits of what is counted: a latency is off by less than 0.5 %, a stretch (in permille) by 0.1 %."""


class Phase(enum.Enum):
    """Where an engine is in its group's round."""

    IDLE = "between rounds"
    LOCAL = "own layers"
    DISPATCH = "waiting for dispatch"
    EXPERTS = "experts"
    COMBINE = "waiting for combine"


_WAITING = (Phase.DISPATCH, Phase.COMBINE)


@dataclass(slots=True)
class CollectiveFigures:
    """What an engine saw of collectives. Latencies: of the slowest shard of each, counted by rounded value in ns.

    Stretches: that latency over the time that the shards take into an idle CNIC, counted in permille.
    """

    rounds: int = 0
    exchanges: int = 0
    sent_bytes: int = 0
    wait_ns: int = 0
    """Time at barriers with a batch in hand: the GPU's bubbles."""
    given_up: int = 0
    """Barriers at which the wait for a peer was given up; the rest of the round passes without it."""
    latencies: dict[bool, Counter[int]] = field(default_factory=lambda: {False: Counter(), True: Counter()})
    stretches: dict[bool, Counter[int]] = field(default_factory=lambda: {False: Counter(), True: Counter()})
    slowest_ns: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    idle_ns: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """Sums of both, exact."""
    attention_ns: dict[int, int] = field(default_factory=dict)
    """By round; rounds that ``every`` does not divide are left out."""
    every: int = 1

    def slowest(self, combine: bool, latency_ns: int, idle_ns: int) -> None:
        """Count a collective's slowest shard; ``idle_ns``: what all its shards take into an idle CNIC."""
        self.latencies[combine][_rounded(latency_ns, _DIGITS)] += 1
        self.stretches[combine][_rounded(1000 * latency_ns // idle_ns, _STRETCH_DIGITS)] += 1
        self.slowest_ns[combine] += latency_ns
        self.idle_ns[combine] += idle_ns

    def attention(self, number: int, duration_ns: int) -> None:
        """Remember a round's attention time of the own batch."""
        if number % self.every == 0:
            self.attention_ns[number] = duration_ns
        if len(self.attention_ns) > _HELD_ROUNDS:
            self.every *= 2
            self.attention_ns = {n: ns for n, ns in self.attention_ns.items() if n % self.every == 0}

    def report(self) -> dict[str, int]:
        """All of it, flat."""
        figures = {
            "collective.rounds": self.rounds,
            "collective.exchanges": self.exchanges,
            "collective.sent_bytes": self.sent_bytes,
            "collective.wait_ns": self.wait_ns,
            "collective.given_up": self.given_up,
            "collective.every": self.every,
        }
        for combine, name in ((False, "dispatch"), (True, "combine")):
            figures |= {f"collective.{name}_ns.{ns}": n for ns, n in sorted(self.latencies[combine].items())}
            figures |= {f"collective.{name}_permille.{p}": n for p, n in sorted(self.stretches[combine].items())}
            figures[f"collective.{name}_slowest_ns"] = self.slowest_ns[combine]
            figures[f"collective.{name}_idle_ns"] = self.idle_ns[combine]
        return figures | {f"collective.attention_ns.{n}": ns for n, ns in self.attention_ns.items()}


def _rounded(value: int, digits: int) -> int:
    shift = max(0, value.bit_length() - digits)
    return (value >> shift << shift) + (1 << shift >> 1)


class ExpertGroup:
    """The rounds of a group, as one engine goes through them. Methods that return a bool say whether the engine has
    something to do: its part is over (``part`` is the next one), or the round is (``phase`` is IDLE)."""

    def __init__(
        self,
        role: str,
        engines: tuple[str, ...],
        collectives: Collectives,
        parts: tuple[Part, ...],
        deadline_ns: int,
        *,
        per_token_ns: float = 0.0,
        per_round_ns: float = 0.0,
    ) -> None:
        """``per_token_ns`` (of the group's mean) and ``per_round_ns``: experts' time per layer with experts."""
        self.role = role
        self.collectives = collectives
        self.parts = parts
        self.peers = tuple(e for e in engines if e != role)
        self.phase = Phase.IDLE
        self.round = 0
        self.part = 0
        self.tokens = 0
        self.loaded = False  # whether the engine entered this round with a batch
        self.figures = CollectiveFigures()
        self._wait_ns = deadline_ns
        self._per_token_ns, self._per_round_ns = per_token_ns, per_round_ns
        self._out_share = {p: collectives.share(engines, role, p) for p in self.peers}
        self._in_share = {p: collectives.share(engines, p, role) for p in self.peers}
        self._leaving = sum(self._out_share.values())
        self._layers = [collectives.expert_layers(p.begin, p.end) for p in parts]
        self._arrived: dict[str, dict[int, tuple[int, int]]] = {p: {} for p in self.peers}  # number -> tokens, latency
        self._excused = dict.fromkeys(self.peers, 0)  # shards below this number are neither awaited nor wrong
        self._absent: dict[str, None] = {}  # not awaited in this round until heard of
        self._brought: dict[str, int] = {}  # tokens of each peer in this part
        self._posted_ns = 0
        self._deadline_ns = 0
        self._extended = False

    # --- what the engine asks ------------------------------------------------------------------------------------

    @property
    def called(self) -> bool:
        """Whether a peer has begun a round that this engine has not entered."""
        return self.phase is Phase.IDLE and len(self._missing()) < len(self.peers)

    @property
    def ready(self) -> bool:
        """Whether the engine may compute a part of its own: before a round, or in one that it entered with a batch."""
        return self.phase is Phase.IDLE or (self.phase is Phase.LOCAL and self.loaded)

    @property
    def current(self) -> Part:
        """The part that is next or under way."""
        return self.parts[self.part]

    @property
    def past(self) -> Part:
        """The part before that."""
        return self.parts[self.part - 1]

    def local_ns(self, whole_ns: int, tokens: int) -> int:
        """What of a part's time is the engine's own.

        ``whole_ns`` contains the experts' time and, being fitted to the real machine, the communication on idle NICs.
        """
        layers = self._layers[self.part]
        elsewhere_ns = self._experts_ns(tokens, tokens > 0) + self.collectives.network_ns(tokens, layers, self._leaving)
        return max(0, whole_ns - elsewhere_ns)

    # --- what the engine does ------------------------------------------------------------------------------------

    def begin(self, attention_ns: int = 0) -> None:
        """Enter the next round with a batch; ``attention_ns`` of it."""
        self.phase, self.loaded = Phase.LOCAL, True
        if attention_ns:
            self.figures.attention(self.round, attention_ns)

    def join(self, out: Outbox, now_ns: int) -> bool:
        """Enter the round that a peer has begun, with nothing."""
        self.loaded = False
        return self._dispatch(0, out, now_ns)

    def computed(self, tokens: int, out: Outbox, now_ns: int) -> bool:
        """The engine's own layers of the part are computed, for ``tokens`` tokens that are still wanted."""
        return self._dispatch(tokens, out, now_ns)

    def experts_computed(self, out: Outbox, now_ns: int) -> bool:
        """The experts are through with the part."""
        self.phase = Phase.COMBINE
        shards = tuple((peer, self._size(self._brought[peer], self._in_share[peer], True)) for peer in self.peers)
        return self._post(shards, out, now_ns)

    def arrived(self, shard: ShardArrived, out: Outbox, now_ns: int) -> bool:
        """A peer's shard has arrived.

        Raises:
            PeerError: it is none of this group's, has been here, or is more than one collective ahead. In the last case
                the group went on without this engine, which then waits no more for what it missed; see ``resume``.
        """
        number, at, peer = self._number_of(shard.tag), self._number, shard.sender
        if peer not in self._arrived:
            raise self._wrong(shard, "is not of its group")
        held, excused = self._arrived[peer], self._excused[peer]
        if number < at:
            if number < excused:
                return False
            raise self._wrong(shard, "comes late, or a second time")
        if number in held:
            raise self._wrong(shard, "comes a second time")
        self._absent.pop(peer, None)
        ahead = number > at + (self.phase in _WAITING)
        if ahead:
            held.clear()
            self._excused[peer] = number
        held[number] = (shard.tokens, shard.latency_ns)
        if ahead and excused <= at:
            raise self._wrong(shard, f"comes while it is at {_name(self._tag)}: the group went on without it")
        return self.resume(out, now_ns)

    def late(self, out: Outbox, now_ns: int) -> str:
        """The deadline has passed: who is missing, in words; they are not awaited in this round any more.

        "" if the deadline was renewed, or is now: a peer of whom nothing later is here may itself wait for a shard that
        was lost, and give up first. So one loss is one error.
        """
        if self.phase not in _WAITING or now_ns < self._deadline_ns:
            return ""
        missing = self._missing()
        if not self._extended and not all(self._arrived[p] for p in missing):
            self._extended = True
            self._deadline_ns = now_ns + self._wait_ns // _EXTENSION
            out.add(SetDeadline(DEADLINE, self._deadline_ns))
            return ""
        for peer in missing:
            if self._arrived[peer]:  # it is there, only this shard is lost
                self._excused[peer] = self._number + 1
            else:
                self._absent[peer] = None
        self.figures.given_up += 1
        return f"{_name(self._tag)} did not come from {', '.join(missing)}"

    def resume(self, out: Outbox, now_ns: int) -> bool:
        """Go on, if everything that is awaited is here."""
        if self.phase not in _WAITING:
            return False
        number = self._number
        for peer in self._absent:
            self._excused[peer] = number + 1
        if self._missing():
            return False
        out.add(ClearDeadline(DEADLINE))
        if self.loaded:
            self.figures.wait_ns += now_ns - self._posted_ns
        combine = self.phase is Phase.COMBINE
        here = [peer for peer in self.peers if number in self._arrived[peer]]
        came = {peer: self._arrived[peer].pop(number, (0, 0)) for peer in self.peers}
        carried = [p for p in here if self._size(self._carried(p, came[p][0], combine), 1.0, combine)]
        if carried:
            idle_ns = sum(self._idle_ns(p, came[p][0], combine) for p in carried)
            self.figures.slowest(combine, max(came[p][1] for p in carried), idle_ns)
        return self._part_over(out, now_ns) if combine else self._experts(came, out, now_ns)

    # --- the round -----------------------------------------------------------------------------------------------

    def _dispatch(self, tokens: int, out: Outbox, now_ns: int) -> bool:
        self.phase, self.tokens = Phase.DISPATCH, tokens
        shards = tuple((peer, self._size(tokens, self._out_share[peer], False)) for peer in self.peers)
        return self._post(shards, out, now_ns)

    def _post(self, shards: tuple[tuple[str, int], ...], out: Outbox, now_ns: int) -> bool:
        self.figures.exchanges += 1
        self.figures.sent_bytes += sum(size for _, size in shards)
        self._posted_ns, self._deadline_ns, self._extended = now_ns, now_ns + self._wait_ns, False
        out.add(Exchange(self._tag, self.tokens, shards))
        out.add(SetDeadline(DEADLINE, self._deadline_ns))
        return self.resume(out, now_ns)

    def _experts(self, came: dict[str, tuple[int, int]], out: Outbox, now_ns: int) -> bool:
        self.phase = Phase.EXPERTS
        self._brought = {peer: tokens for peer, (tokens, _) in came.items()}
        total = self.tokens + sum(self._brought.values())
        duration_ns = self._experts_ns(total / (len(self.peers) + 1), total > 0)
        if not duration_ns:
            return self.experts_computed(out, now_ns)
        out.add(Compute(EXPERTS_ID, duration_ns))
        return False

    def _experts_ns(self, mean_tokens: float, any_tokens: bool) -> int:
        per_layer_ns = self._per_token_ns * mean_tokens + (self._per_round_ns if any_tokens else 0)
        return round(per_layer_ns * self._layers[self.part])

    def _part_over(self, out: Outbox, now_ns: int) -> bool:
        self.part += 1
        if self.part == len(self.parts):
            self.part, self.phase = 0, Phase.IDLE
            self.round += 1
            self._absent.clear()
            self.figures.rounds += 1
            return True
        self.phase = Phase.LOCAL
        return True if self.loaded else self._dispatch(0, out, now_ns)

    # --- shards --------------------------------------------------------------------------------------------------

    def _size(self, tokens: int, share: float, combine: bool) -> int:
        return self.collectives.shard_bytes(tokens, self._layers[self.part], share, combine=combine)

    def _carried(self, peer: str, tokens: int, combine: bool) -> int:
        """Tokens whose bytes a peer's shard brought: its own in dispatch, this engine's in combine; 0 on no path."""
        if combine:
            return self.tokens if self._out_share[peer] else 0
        return tokens if self._in_share[peer] else 0

    def _idle_ns(self, peer: str, tokens: int, combine: bool) -> int:
        """What a peer's shard takes into an idle CNIC; at least 1."""
        share = self._out_share[peer] if combine else self._in_share[peer]
        size = shard_wire_bytes(self._size(self.tokens if combine else tokens, share, combine))
        return max(1, size * 8 * NS_PER_S // self.collectives.cnic_rate_bps)

    def _missing(self) -> list[str]:
        """Peers whose shard of the collective is not here, and who are not excused."""
        number = self._number
        return [peer for peer, held in self._arrived.items() if number not in held and self._excused[peer] <= number]

    def _wrong(self, shard: ShardArrived, why: str) -> PeerError:
        return PeerError(f"{self.role}: {_name(shard.tag)} from {shard.sender} {why}")

    @property
    def _tag(self) -> ExchangeTag:
        return ExchangeTag(self.round, self.part, self.phase in (Phase.EXPERTS, Phase.COMBINE))

    @property
    def _number(self) -> int:
        """The collective that is awaited, or is to be posted next, counted from the start."""
        return 2 * (self.round * len(self.parts) + self.part) + (self.phase in (Phase.EXPERTS, Phase.COMBINE))

    def _number_of(self, tag: ExchangeTag) -> int:
        if not (0 <= tag.part < len(self.parts) and tag.round >= 0):
            raise PeerError(f"{self.role}: {_name(tag)}, but a round has {len(self.parts)} parts")
        return 2 * (tag.round * len(self.parts) + tag.part) + tag.combine


def _name(tag: ExchangeTag) -> str:
    return f"{'combine' if tag.combine else 'dispatch'} of round {tag.round} part {tag.part}"
