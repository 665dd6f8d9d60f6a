"""Write-back of Full Blocks (paper 4.1, 5.2): DRAM -> SNIC -> every replica, then visible in the index, never before.

A job holds its page until the block is durable or given up, whatever becomes of the request that made it: the bytes
are right and may serve others. A block that cannot be stored (disk full, server gone) is given up: serving continues,
without that hit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from testbed.ids import INDEX, snic_endpoint
from testbed.protocol import messages as m
from testbed.protocol.machine import ClearDeadline, Outbox, SetDeadline, Write
from testbed.protocol.pages import PagePool
from testbed.protocol.params import ProtocolParams
from testbed.protocol.placement import replicas_of

DEADLINE_PREFIX = "persist/"


@dataclass(slots=True, kw_only=True)
class PersistJob:
    """One block on its way to storage from a page of ``pool``, which it holds, at byte ``offset`` of the DRAM.

    ``pages``: that page, or none where writing back is free.
    """

    request_id: str
    key: int
    parent: int
    pool: PagePool
    pages: tuple[int, ...]
    offset: int
    waiting_for: set[str] = field(default_factory=set)
    written_to: set[str] = field(default_factory=set)
    writes_out: int = 0
    given_up: bool = False


class Persister:
    """Bounded write-back queue of one node."""

    def __init__(
        self,
        role: str,
        servers: tuple[str, ...],
        params: ProtocolParams,
        out: Outbox,
        new_write_id: Callable[[], int],
        settled: Callable[[PersistJob, bool], None],
    ) -> None:
        """``settled(job, durable)`` is called once per job, when nothing reads its page any more."""
        self._role = role
        self._servers = servers
        self._params = params
        self._out = out
        self._new_write_id = new_write_id
        self._settled = settled
        self._queue: deque[PersistJob] = deque()
        self._active: dict[tuple[str, int], PersistJob] = {}
        self._writes: dict[int, tuple[PersistJob, str]] = {}
        self.blocks_given_up = 0

    def submit(self, job: PersistJob, now_ns: int) -> None:
        """Queue a block."""
        self._queue.append(job)
        self._pump(now_ns)

    def _pump(self, now_ns: int) -> None:
        while self._queue and len(self._active) < self._params.persist_window_blocks:
            job = self._queue.popleft()
            self._active[job.request_id, job.key] = job
            self._out.add(SetDeadline(_deadline(job), now_ns + self._params.wait_deadline_ns))
            if self._params.write_back == "free":
                self._out.send(INDEX, m.PublishBlock(job.request_id, job.key, job.parent))
                continue
            job.waiting_for = set(replicas_of(job.key, self._servers, self._params.replicas))
            for server in sorted(job.waiting_for):
                self._out.send(server, m.PersistBlock(job.request_id, job.key))

    def on_message(
        self, sender: str, message: m.PersistOpened | m.BlockStored | m.BlockNotStored | m.BlockPublished, now_ns: int
    ) -> None:
        """Answers from storage servers and the index; for a job that is gone they change nothing."""
        job = self._active.get((message.request_id, message.key))
        if job is None:
            return
        match message:
            case m.PersistOpened():
                if sender in job.written_to:  # a repeat: its grant has been used
                    return
                job.written_to.add(sender)
                write_id = self._new_write_id()
                self._writes[write_id] = (job, sender)
                job.writes_out += 1
                size = self._params.layout.full_block_bytes
                self._out.add(Write(write_id, message.grant, snic_endpoint(self._role), (job.offset,), size))
            case m.BlockStored():
                job.waiting_for.discard(sender)
                if not job.waiting_for:
                    self._out.send(INDEX, m.PublishBlock(job.request_id, job.key, job.parent))
            case m.BlockNotStored():
                self._give_up(job, now_ns)
            case m.BlockPublished():
                self._finish(job, durable=True, now_ns=now_ns)

    def write_ended(self, write_id: int, failure: str, now_ns: int) -> bool:
        """A write of ours has ended; False when it is not ours."""
        if write_id not in self._writes:
            return False
        job, _ = self._writes.pop(write_id)
        job.writes_out -= 1
        if job.given_up:
            if not job.writes_out:
                self._settled(job, False)
        elif failure:
            self._give_up(job, now_ns)
        return True

    def deadline_passed(self, key: str, now_ns: int) -> bool:
        """A job's deadline; False when the key is not one."""
        if not key.startswith(DEADLINE_PREFIX):
            return False
        for job in [j for j in self._active.values() if _deadline(j) == key]:
            self._give_up(job, now_ns)
        return True

    def _give_up(self, job: PersistJob, now_ns: int) -> None:
        self.blocks_given_up += 1
        self._finish(job, durable=False, now_ns=now_ns)

    def _finish(self, job: PersistJob, *, durable: bool, now_ns: int) -> None:
        del self._active[job.request_id, job.key]
        self._out.add(ClearDeadline(_deadline(job)))
        if job.writes_out:  # the page is still being read: settled when the last write ends
            job.given_up = True
        else:
            self._settled(job, durable)
        self._pump(now_ns)


def _deadline(job: PersistJob) -> str:
    return f"{DEADLINE_PREFIX}{job.request_id}/{job.key:016x}"
