"""Decode engine (DE): takes the prompt's KV from the DE buffer into HBM after prefill, decodes with continuous
batching, and has every full block persisted at once (paper 4.1).

The partial tail block is not stored: the next turn computes its tokens again (UNKNOWN in the paper; this is the rule
that needs no rewriting of stored blocks). A request completes when all tokens are emitted and all its full blocks are
durable, so that the next turn, which comes at once in replay, hits them.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from emulators.base import Record, participants, unexpected
from emulators.collectives import EXPERTS_ID, ExpertGroup, Phase
from emulators.group_member import GroupMember
from testbed.errors import PeerError
from testbed.ids import DRIVER, INDEX, hbm_endpoint, is_copy_endpoint
from testbed.protocol import messages as m
from testbed.protocol.batching import CostModel
from testbed.protocol.grants import GrantIssuer, Landing
from testbed.protocol.layout import KeyChain
from testbed.protocol.machine import (
    CloseGrant,
    Compute,
    ComputeDecode,
    ComputeFinished,
    DeadlinePassed,
    DecodeItem,
    Event,
    ForgetSequence,
    LandingRefused,
    LoadSequence,
    OpenGrant,
    ShardArrived,
    Started,
    WriteCompleted,
    WriteFailed,
    WriteLanded,
)
from testbed.protocol.pages import PagePool
from testbed.protocol.params import ProtocolParams, SystemConfig
from testbed.protocol.transitions import TransitionTable
from testbed.protocol.trie import ROOT


class DecodeState(enum.Enum):
    """A request at a DE."""

    PREFILLING = "waiting for prefill"
    WAITING_HBM = "waiting for HBM"
    LOADING = "loading HBM"
    DECODING = "decoding"
    DRAINING = "persisting"
    COMPLETED = "completed"


_P, _W, _L, _D, _N, _X = DecodeState

TABLE = TransitionTable(
    role="decode engine",
    start=_P,
    ends=frozenset({_X}),
    edges={
        _P: {"PromptBuffered": (_P, _W, _N), "PrefillFinished": (_P, _W, _N), "BlockSettled": (_P,)},
        _W: {"HbmTaken": (_L, _D), "BlockSettled": (_W,)},
        _L: {"PromptLanded": (_D,), "BlockSettled": (_L,)},
        _D: {"Stepped": (_D, _N), "StageOpened": (_D,), "BlockSettled": (_D,), "BlockCopied": (_D,)},
        _N: {"StageOpened": (_N,), "BlockSettled": (_N,), "BlockCopied": (_N,), "AllSettled": (_X,)},
    },
    ignored={state: frozenset({"AssignDecode", "PromptBuffered", "PrefillFinished"}) for state in (_W, _L, _D, _N)}
    | {_P: frozenset({"AssignDecode"})},
    patience={_P: 8, _N: 2},
)


@dataclass(slots=True, kw_only=True)
class _Sequence(Record):
    assignment: m.Assignment
    keys: KeyChain
    buffered: bool = False
    emitted: list[int] = field(default_factory=list)
    pages: tuple[int, ...] = ()
    grant_id: int = 0
    unsettled: set[int] = field(default_factory=set)  # keys of full blocks not durable yet
    copied: set[int] = field(default_factory=set)  # keys of full blocks whose copy to DRAM has been posted
    published: bool = False

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV is in HBM."""
        return self.assignment.prompt_tokens + max(0, len(self.emitted) - 1)


class DecodeEngine(GroupMember[_Sequence]):
    """One DE (one GPU). Memory: ``de_hbm_pages`` pages of one Full Block."""

    table = TABLE  # type: ignore[assignment]

    def __init__(
        self,
        engine: str,
        leader: str,
        system: SystemConfig,
        params: ProtocolParams,
        cost: CostModel,
        group: ExpertGroup | None = None,
    ) -> None:
        super().__init__(engine, leader, system, params, cost, group)
        self.hbm = PagePool(capacity=params.de_hbm_pages, page_bytes=params.layout.full_block_bytes)
        self.issuer = GrantIssuer()
        self.waiting: deque[str] = deque()
        self.active: dict[str, _Sequence] = {}  # in decode, in order of joining
        self.stepping: tuple[str, ...] = ()
        self.stepping_pages: tuple[int, ...] = ()
        self.stepping_ns = 0  # duration of the whole step
        self.stepped: dict[str, int] = {}  # its tokens, until its last part is over
        self.landing: dict[int, str] = {}  # open grant -> request
        self.copies: dict[int, tuple[str, int]] = {}  # write out -> (request, page it holds)
        self._next_id = 0

    # --- messages ------------------------------------------------------------------------------------------------

    def on_message(self, sender: str, message: m.Message) -> None:
        """Assignments from the leader, the first token from the PE, progress from the own node's DRAM."""
        match message:
            case m.AssignDecode():
                self._admit(message.assignment)
                self.replay_early(message.assignment.request_id)
            case m.PrefillFinished() if self.hold_if_early(sender, message.request_id, message):
                pass
            case m.PromptBuffered():
                if (sequence := self.find(message.request_id, "PromptBuffered")) is not None:
                    sequence.buffered = True
                    self._check_ready(sequence, "PromptBuffered")
            case m.PrefillFinished():
                if (sequence := self.find(message.request_id, "PrefillFinished")) is not None:
                    self._first_token(sequence, message.token)
            case m.StageOpened():
                if (sequence := self.find(message.request_id, "StageOpened")) is not None:
                    self._copy_out(sequence, message)
            case m.BlockSettled():
                if (sequence := self.find(message.request_id, "BlockSettled")) is not None:
                    self._settled(sequence, message.key)
            case m.BlockPublished() if not self.system.moves_kv:  # Oracle publishes by itself
                if (sequence := self.find(message.request_id, "BlockSettled")) is not None:
                    self._settled(sequence, message.key)
            case _:
                raise PeerError(f"{self.role}: {type(message).__name__} from {sender} is not for a decode engine")

    def _admit(self, a: m.Assignment) -> None:
        layout = self.params.layout
        sequence = _Sequence(
            request_id=a.request_id, state=_P, participants=participants(a), assignment=a, keys=KeyChain(layout)
        )
        sequence.keys.extend(np.frombuffer(a.tokens, dtype="<u4"))
        if not self.begin(sequence):
            self.release_ended(a.request_id, self.leader)
            return
        need = self._pages_needed(a)
        if need > self.hbm.capacity:
            detail = f"it needs {need} blocks, the HBM of {self.role} has {self.hbm.capacity}"
            self.fail(sequence, "HbmTooSmall", detail)
        elif self.system.moves_kv:
            sequence.unsettled = set(a.keys[a.hit_blocks : layout.full_blocks(a.prompt_tokens)])
            self.out.send(a.decode_node, m.ReserveBuffer(a))
        else:
            sequence.buffered = True

    def _pages_needed(self, a: m.Assignment) -> int:
        return self.params.layout.sequence_blocks(a.prompt_tokens, a.generate_tokens)

    def _first_token(self, sequence: _Sequence, token: int) -> None:
        if not sequence.emitted:
            sequence.emitted.append(token)
        self._check_ready(sequence, "PrefillFinished")

    def _check_ready(self, sequence: _Sequence, event: str) -> None:
        """Both the prompt's KV and the first token are here: on to HBM, or to the end if nothing is left to decode."""
        if not (sequence.buffered and sequence.emitted):
            self.move(sequence, event, _P)
            return
        if sequence.assignment.generate_tokens > 1:
            self.move(sequence, event, _W)
            self.waiting.append(sequence.request_id)
            self._pump_waiting()
            return
        self.move(sequence, event, _N)
        if self.system.moves_kv:
            self.out.send(sequence.assignment.decode_node, m.SkipPrompt(sequence.request_id))
        self._check_completed(sequence)

    # --- into HBM ------------------------------------------------------------------------------------------------

    def _pump_waiting(self) -> None:
        """HBM is taken only now, after prefill (paper 4.1), in FIFO order; a request waits for all that it needs.

        The leader has counted it since the assignment (8.3): only where that is not looked at does a queue grow here.
        """
        while self.waiting:
            sequence = self.records.get(self.waiting[0])
            if sequence is None:
                self.waiting.popleft()
                continue
            pages = self.hbm.take(self._pages_needed(sequence.assignment))
            if pages is None:
                return
            self.waiting.popleft()
            sequence.pages = pages
            if self.system.moves_kv:
                self.move(sequence, "HbmTaken", _L)
                self._load(sequence)
            else:
                self.move(sequence, "HbmTaken", _D)
                self._join(sequence)

    def _load(self, sequence: _Sequence) -> None:
        a, layout = sequence.assignment, self.params.layout
        landing = Landing(
            pieces=self._offsets(sequence)[: len(a.keys)],
            piece_bytes=layout.full_block_bytes,
            keys=a.keys,
            layer_begin=0,
            layer_end=layout.layers,
        )
        ref = self.issuer.issue(hbm_endpoint(self.role, direct=self.system.direct_copies), landing)
        sequence.grant_id = ref.grant_id
        self.landing[ref.grant_id] = a.request_id
        self.out.add(OpenGrant(ref, landing))
        self.out.send(a.decode_node, m.LoadPrompt(a.request_id, ref))

    def _offsets(self, sequence: _Sequence) -> tuple[int, ...]:
        return tuple(self.hbm.offset(p) for p in sequence.pages)

    def _join(self, sequence: _Sequence) -> None:
        a = sequence.assignment
        self.out.add(LoadSequence(a.request_id, a.tokens, self._offsets(sequence)))
        self.active[a.request_id] = sequence
        self._step()

    # --- decode --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Start a decode step over all active sequences (continuous batching), if none runs."""
        if self.stepping or not self.active or (self.group is not None and not self.group.ready):
            self.go_along()
            return
        batch = list(self.active.values())[: self.params.max_decode_batch]
        self.stepping = tuple(s.request_id for s in batch)
        items = tuple(self._item(s) for s in batch)
        # A step in flight reads these pages, whatever becomes of their requests meanwhile.
        self.stepping_pages = tuple(p for s in batch for p in s.pages)
        self.hbm.retain(self.stepping_pages)
        self.stepping_ns = self.cost.decode_step_time_ns([s.context_tokens + 1 for s in batch])
        if self.group is not None:
            self.group.begin()
        self.out.add(ComputeDecode(self._new_id(), self._duration_ns(), items))

    def _duration_ns(self) -> int:
        """Time of a step; with collectives, of its next part without the experts."""
        group = self.group
        if group is None:
            return self.stepping_ns
        whole_ns = self.stepping_ns * group.current.layers // self.params.layout.layers
        return group.local_ns(whole_ns, len(self.batch()))

    def _compute_finished(self, event: ComputeFinished) -> None:
        if self.group is None:
            self._stepped(event.tokens)
        elif event.compute_id == EXPERTS_ID:
            self.experts_computed()
        else:
            self.stepped |= event.tokens
            self.part_computed(len(self.batch()))

    def has_batch(self) -> bool:
        """A sequence is in decode."""
        return bool(self.stepping or self.active)

    def batch(self) -> list[_Sequence]:
        """Sequences of the step that are still wanted."""
        return [self.active[r] for r in self.stepping if r in self.active]

    def part_over(self) -> None:
        """Go on with the next part of the step, or with the next step."""
        assert self.group is not None
        if not self.stepping:
            self._step()
        elif self.group.phase is Phase.IDLE:
            tokens, self.stepped = self.stepped, {}
            self._stepped(tokens)
        else:
            self.out.add(Compute(self._new_id(), self._duration_ns() if self.batch() else 0))

    def _item(self, s: _Sequence) -> DecodeItem:
        """Every byte of KV is read again for the first and the last token of a sequence."""
        last = len(s.emitted) == s.assignment.generate_tokens - 1
        return DecodeItem(
            s.request_id, s.emitted[-1], s.context_tokens, self._offsets(s), reread=last or len(s.emitted) == 1
        )

    def _stepped(self, tokens: dict[str, int]) -> None:
        self.hbm.release(self.stepping_pages)
        self.stepping_pages = ()
        for request_id in self.stepping:  # still set: who joins meanwhile must not start a step with half the results
            sequence = self.active.get(request_id)
            if sequence is not None:
                self._emit(sequence, tokens[request_id])
        self.stepping = ()
        self._pump_waiting()
        self._step()

    def _emit(self, sequence: _Sequence, token: int) -> None:
        a = sequence.assignment
        self.out.send(DRIVER, m.TokensEmitted(a.request_id, len(sequence.emitted), (token,)))
        # The step has computed the KV of the token before this one; that may have filled a block.
        filled = sequence.keys.extend(np.array(sequence.emitted[-1:], dtype=np.uint32))
        sequence.emitted.append(token)
        for key in filled:
            self._persist(sequence, key)
        if len(sequence.emitted) < a.generate_tokens:
            self.move(sequence, "Stepped", _D)
            return
        del self.active[a.request_id]
        self.out.add(ForgetSequence(a.request_id))
        self.move(sequence, "Stepped", _N)
        self._check_completed(sequence)

    def _persist(self, sequence: _Sequence, key: int) -> None:
        """A full block has accumulated: have it persisted at once (paper 4.1)."""
        if not self.system.moves_kv:
            return
        keys = sequence.keys.full
        parent = keys[-2] if len(keys) > 1 else ROOT
        sequence.unsettled.add(key)
        self.out.send(sequence.assignment.decode_node, m.StageBlock(sequence.request_id, key, parent))

    def _copy_out(self, sequence: _Sequence, message: m.StageOpened) -> None:
        """D2H of a full block, by the path that the DRAM grants; its page stays until the copy has ended."""
        if message.key not in sequence.unsettled or message.key not in sequence.keys.full:
            raise PeerError(f"{self.role}: room for block {message.key:016x}, which has not been asked for")
        self.move(sequence, "StageOpened", sequence.state)
        if message.key in sequence.copied:  # a repeat: its grant has been used
            return
        sequence.copied.add(message.key)
        page = sequence.pages[sequence.keys.full.index(message.key)]
        self.hbm.retain((page,))
        write_id = self._new_id()
        self.copies[write_id] = (sequence.request_id, page)
        size = self.params.layout.full_block_bytes
        via = hbm_endpoint(self.role, direct=is_copy_endpoint(message.grant.endpoint))
        self.out.add(self.params.submission.write(write_id, message.grant, via, (self.hbm.offset(page),), size))

    # --- the end -------------------------------------------------------------------------------------------------

    def _settled(self, sequence: _Sequence, key: int) -> None:
        self.move(sequence, "BlockSettled", sequence.state)
        sequence.unsettled.discard(key)
        self._check_completed(sequence)

    def _check_completed(self, sequence: _Sequence) -> None:
        """All tokens emitted and all full blocks settled: the request is done."""
        if sequence.state is not _N:
            return
        if not self.system.moves_kv and not sequence.published:
            self._publish(sequence)
        if sequence.unsettled:
            return
        a = sequence.assignment
        self.hbm.release(sequence.pages)
        sequence.pages = ()
        if self.system.moves_kv:
            self.out.send(a.decode_node, m.RequestReleased(a.request_id, self.role))
        self.out.send(self.leader, m.RequestReleased(a.request_id, self.role))
        self.out.send(DRIVER, m.RequestCompleted(a.request_id))
        self.move(sequence, "AllSettled", _X)
        self._pump_waiting()

    def _publish(self, sequence: _Sequence) -> None:
        """Oracle: blocks count as stored without having been moved."""
        sequence.published = True
        a, parent = sequence.assignment, ROOT
        for k, key in enumerate(sequence.keys.full):
            if k >= a.hit_blocks:
                sequence.unsettled.add(key)
                self.out.send(INDEX, m.PublishBlock(a.request_id, key, parent))
            parent = key

    def on_event(self, event: Event) -> None:
        """Landings in HBM, completions of compute and of own writes."""
        match event:
            case WriteLanded():
                sequence = self.records.get(self.landing.pop(event.grant_id, ""))
                if sequence is not None:
                    self.move(sequence, "PromptLanded", _D)
                    self._join(sequence)
            case LandingRefused():
                sequence = self.records.get(self.landing.get(event.grant_id, ""))
                if sequence is not None:
                    self.fail(sequence, "WrongBlockLanded", event.reason)
            case ComputeFinished():
                self._compute_finished(event)
            case WriteCompleted():
                self._copied(event.write_id, "")
            case WriteFailed():
                self._copied(event.write_id, event.reason)
            case ShardArrived() | DeadlinePassed():
                self.on_collective(event)
            case Started():
                pass
            case _:
                raise unexpected(self.role, event)

    def _copied(self, write_id: int, failure: str) -> None:
        request_id, page = self.copies.pop(write_id)
        self.hbm.release((page,))
        sequence = self.records.get(request_id)
        if sequence is not None:
            self.move(sequence, "BlockCopied", sequence.state)
            if failure:
                self.fail(sequence, "WriteRefused", failure)
        self._pump_waiting()

    def release(self, record: _Sequence) -> None:
        """Close its grant, let go of its HBM; a step or copy in flight holds the pages that it reads."""
        if record.grant_id:
            self.out.add(CloseGrant(record.grant_id))
            self.landing.pop(record.grant_id, None)
        self.active.pop(record.request_id, None)
        self.hbm.release(record.pages)
        record.pages = ()
        self.out.add(ForgetSequence(record.request_id))
        self.out.send(self.leader, m.RequestReleased(record.request_id, self.role))
        self._pump_waiting()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
