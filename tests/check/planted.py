"""Machines with one mistake each, for the check world to find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from emulators.central_scheduler import CentralScheduler, _Request
from emulators.cluster import RoleDescription
from emulators.dram_buffer import DramBuffer, Held
from emulators.dram_cache import DramCache
from emulators.persister import Persister, PersistJob
from emulators.prefill_engine import PrefillEngine, _Step
from testbed.fabric.spec import NodeKind
from testbed.ids import INDEX
from testbed.protocol import messages as m
from testbed.protocol.grants import GrantRef
from testbed.protocol.machine import CloseGrant


class GrantReused(DramBuffer):
    """The last layer step of a chunk is given the grant of the first."""

    def _open_steps(self, held: Held, message: m.OpenLayerWrites) -> tuple[GrantRef, ...]:
        refs = super()._open_steps(held, message)
        return (*refs[:-1], refs[0])


class VisibleBeforeDurable(DramBuffer):
    """The index is told when the block has been asked to be stored (its persister does it)."""


class EarlyPersister(Persister):
    """Publishes a block before the servers have it."""

    def submit(self, job: PersistJob, now_ns: int) -> None:
        """Queue a block, and tell the index at once."""
        self._out.send(INDEX, m.PublishBlock(job.request_id, job.key, job.parent))
        super().submit(job, now_ns)


class GrantsLeftOpen(DramBuffer):
    """A request that has been given up keeps its grants open: a write that comes late is taken."""

    def release(self, record: Held) -> None:
        """Give everything back, but do not revoke."""
        super().release(record)
        self.out.actions = [action for action in self.out.actions if not isinstance(action, CloseGrant)]


class LostWakeUp(PrefillEngine):
    """When the last step's loads are here nobody looks whether compute may start."""

    def _loaded(self, step: _Step) -> None:
        self.woken = step.end < self.params.layout.layers
        super()._loaded(step)

    def _start_compute(self) -> None:
        if getattr(self, "woken", True):
            super()._start_compute()
        self.woken = True


class AssignedTwice(CentralScheduler):
    """A request that has just been assigned is assigned once more."""

    def _assign(self, request: _Request, chosen_now: NodeKind) -> None:
        super()._assign(request, chosen_now)
        if request.request_id not in self.again:
            self.again = (*self.again, request.request_id)
            self._ended.pop(request.request_id, None)
            self.records[request.request_id] = request
            super()._assign(request, chosen_now)

    again: tuple[str, ...] = ()

    def move(self, record: _Request, event: str, following: Any) -> None:
        """Without asking the table."""
        record.state = following
        if following in self.table.ends:
            self.end(record)
        else:
            self._renew(record)


class StartsWithOneHalf(PrefillEngine):
    """The first node that has read its hits lets the prefill begin, though the other still reads."""

    def on_message(self, sender: str, message: m.Message) -> None:
        """As it should, but nobody else is waited for."""
        if isinstance(message, m.PrefixLoaded) and message.request_id in self.records:
            self.records[message.request_id].reading.clear()
        super().on_message(sender, message)


class MissesMergedWrongly(DramBuffer):
    """What the PE sends goes to the place of the hits that the DE node has read."""

    def _open_steps(self, held: Held, message: m.OpenLayerWrites) -> tuple[GrantRef, ...]:
        pages = held.pages
        if held.assignment.de_blocks and message.first_block:
            held.pages = (*pages[1:], pages[0])
        refs = super()._open_steps(held, message)
        held.pages = pages
        return refs


class EvictedStillLent(DramCache):
    """A block that has been evicted is lent nevertheless: its page may be anybody's by now."""

    def keep(self, keys: Iterable[int], pages: Iterable[int]) -> None:
        """Keep, and remember what had to go."""
        keys, pages = tuple(keys), tuple(pages)
        before = dict(zip(keys, pages, strict=True)) | self.lru
        super().keep(keys, pages)
        self.gone = {**self.gone, **{key: page for key, page in before.items() if key not in self.lru}}

    def lend(self, keys: Iterable[int]) -> dict[int, int]:
        """What is here, and what was."""
        keys = tuple(keys)
        return {key: self.gone[key] for key in keys if key in self.gone} | super().lend(keys)

    gone: Mapping[int, int] = MappingProxyType({})


class UsesEvicted(DramBuffer):
    """A node's DRAM with that cache."""


_PARTS = {
    VisibleBeforeDurable: ("persister", EarlyPersister),
    UsesEvicted: ("cache", EvictedStillLent),
}
"""Machines whose mistake is in a part of theirs."""


def planted(machine: type, name: str) -> Callable[[list[RoleDescription]], list[RoleDescription]]:
    """Descriptions in which the role ``name`` is a ``machine``: same state, one method else."""

    def alter(descriptions: list[RoleDescription]) -> list[RoleDescription]:
        return [_altered(d, machine) if d.name == name else d for d in descriptions]

    return alter


def _altered(description: RoleDescription, machine: type) -> RoleDescription:
    def make() -> Any:
        made: Any = description.make()
        made.__class__ = machine
        if machine in _PARTS:
            part, mistaken = _PARTS[machine]
            getattr(made, part).__class__ = mistaken
        return made

    return replace(description, make=make)
