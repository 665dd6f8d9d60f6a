"""Storage server (paper 4, A.5): serves and keeps Full Blocks, nothing smaller.

Reads and write-backs have staging pages of their own, so neither can starve the other of memory; both queues are
bounded. A block is announced as stored only when the world says that it is durable.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from emulators.base import report_stray, unexpected
from testbed.ids import snic_endpoint
from testbed.protocol import messages as m
from testbed.protocol.grants import GrantIssuer, Landing
from testbed.protocol.machine import (
    Action,
    BlockFetched,
    BlockWritten,
    ClearDeadline,
    CloseGrant,
    DeadlinePassed,
    Event,
    FetchBlock,
    FetchFailed,
    LandingRefused,
    OpenGrant,
    Outbox,
    Received,
    SetDeadline,
    Started,
    StoreBlock,
    StoreFailed,
    Write,
    WriteCompleted,
    WriteFailed,
    WriteLanded,
)
from testbed.protocol.pages import PagePool
from testbed.protocol.params import ProtocolParams


@dataclass(frozen=True, slots=True)
class _Task:
    """A block to serve or to store, for ``peer``; ``page`` once it has staging memory."""

    peer: str
    message: m.ReadBlock | m.PersistBlock
    page: int = -1


class StorageServer:
    """One storage server. Memory: ``storage_pages`` pages for reads, then as many for writes."""

    def __init__(self, role: str, params: ProtocolParams) -> None:
        self.role = role
        self.params = params
        self.out = Outbox()
        self.issuer = GrantIssuer()
        size = params.layout.full_block_bytes
        self.read_pages = PagePool(capacity=params.storage_pages, page_bytes=size)
        self.write_pages = PagePool(capacity=params.storage_pages, page_bytes=size)
        self.reads: deque[_Task] = deque()
        self.stores: deque[_Task] = deque()
        self.fetching: dict[int, _Task] = {}  # page -> task
        self.sending: dict[int, _Task] = {}  # write -> task
        self.receiving: dict[int, _Task] = {}  # open grant -> task
        self.storing: dict[int, _Task] = {}  # page -> task
        self.strays = 0
        self._next_write = 0
        self._now_ns = 0

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event. A message that is not for a storage server ends its request by name.

        Raises:
            BugError: an event that no storage server asks its world for.
        """
        self._now_ns = now_ns
        match event:
            case Received():
                self._receive(event.sender, event.message)
            case BlockFetched():
                self._fetched(event.page)
            case FetchFailed():
                self._unreadable(self.fetching.pop(event.page), event.reason)
            case WriteCompleted() | WriteFailed():
                self.read_pages.release((self.sending.pop(event.write_id).page,))
                self._pump_reads()
            case WriteLanded():
                self._landed(event.grant_id)
            case LandingRefused():
                self._give_up(event.grant_id, event.reason)
            case BlockWritten():
                task = self._stored(event.page)
                self.out.send(task.peer, m.BlockStored(task.message.request_id, task.message.key))
            case StoreFailed():
                task = self._stored(event.page)
                self.out.send(task.peer, m.BlockNotStored(task.message.request_id, task.message.key, event.reason))
            case DeadlinePassed():
                self._give_up(int(event.key), "the block never arrived")
            case Started():
                pass
            case _:
                raise unexpected(self.role, event)
        return self.out.take()

    def _receive(self, sender: str, message: m.Message) -> None:
        match message:
            case m.ReadBlock():
                if len(self.reads) >= self.params.queue_limit:
                    self.out.send(sender, m.BlockUnreadable(message.request_id, message.key, "read queue full"))
                else:
                    self.reads.append(_Task(sender, message))
                    self._pump_reads()
            case m.PersistBlock():
                if self._is_storing(sender, message):
                    return  # a repeat
                if len(self.stores) >= self.params.queue_limit:
                    self.out.send(sender, m.BlockNotStored(message.request_id, message.key, "write queue full"))
                else:
                    self.stores.append(_Task(sender, message))
                    self._pump_stores()
            case m.AbortRequest():
                pass  # blocks are served one by one; a grant that was closed refuses them where they land
            case _:
                self.strays += 1
                self.out.actions.extend(report_stray(self.role, sender, message))

    # --- reads ---------------------------------------------------------------------------------------------------

    def _pump_reads(self) -> None:
        while self.reads:
            pages = self.read_pages.take(1)
            if pages is None:
                return
            task = self.reads.popleft()
            self.fetching[pages[0]] = _Task(task.peer, task.message, pages[0])
            self.out.add(FetchBlock(task.message.key, pages[0], self.read_pages.offset(pages[0])))

    def _fetched(self, page: int) -> None:
        task = self.fetching.pop(page)
        assert isinstance(task.message, m.ReadBlock)
        self._next_write += 1
        self.sending[self._next_write] = task
        size = self.params.layout.full_block_bytes
        pieces = (self.read_pages.offset(page),)
        self.out.add(Write(self._next_write, task.message.grant, snic_endpoint(self.role), pieces, size))

    def _unreadable(self, task: _Task, reason: str) -> None:
        self.read_pages.release((task.page,))
        self.out.send(task.peer, m.BlockUnreadable(task.message.request_id, task.message.key, reason))
        self._pump_reads()

    # --- write-back ----------------------------------------------------------------------------------------------

    def _write_offset(self, page: int) -> int:
        return self.read_pages.capacity * self.read_pages.page_bytes + self.write_pages.offset(page)

    def _is_storing(self, peer: str, message: m.PersistBlock) -> bool:
        tasks = (*self.stores, *self.receiving.values(), *self.storing.values())
        return any(t.peer == peer and t.message == message for t in tasks)

    def _pump_stores(self) -> None:
        while self.stores:
            pages = self.write_pages.take(1)
            if pages is None:
                return
            task = self.stores.popleft()
            landing = Landing(
                pieces=(self._write_offset(pages[0]),),
                piece_bytes=self.params.layout.full_block_bytes,
                keys=(task.message.key,),
                layer_begin=0,
                layer_end=self.params.layout.layers,
            )
            ref = self.issuer.issue(snic_endpoint(self.role), landing)
            self.receiving[ref.grant_id] = _Task(task.peer, task.message, pages[0])
            self.out.add(OpenGrant(ref, landing))
            self.out.add(SetDeadline(str(ref.grant_id), self._now_ns + self.params.wait_deadline_ns))
            self.out.send(task.peer, m.PersistOpened(task.message.request_id, task.message.key, ref))

    def _landed(self, grant_id: int) -> None:
        task = self.receiving.pop(grant_id, None)
        if task is None:  # given up while the landing was on its way to us
            return
        self.out.add(ClearDeadline(str(grant_id)))
        self.storing[task.page] = task
        self.out.add(StoreBlock(task.message.key, task.page, self._write_offset(task.page)))

    def _give_up(self, grant_id: int, reason: str) -> None:
        task = self.receiving.pop(grant_id, None)
        if task is None:
            return
        self.out.add(CloseGrant(grant_id))
        self.out.add(ClearDeadline(str(grant_id)))
        self.write_pages.release((task.page,))
        self.out.send(task.peer, m.BlockNotStored(task.message.request_id, task.message.key, reason))
        self._pump_stores()

    def _stored(self, page: int) -> _Task:
        task = self.storing.pop(page)
        self.write_pages.release((page,))
        self._pump_stores()
        return task
