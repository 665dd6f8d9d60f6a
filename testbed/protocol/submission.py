"""What submitting a copy costs, and when it may leave (paper 5.2).

A copy between a node's DRAM and a GPU is submitted block by block: one ``cudaMemcpyAsync`` each (5-7 us, closed
driver), or one RDMA write request each (1 us), whose doorbell may be rung once for a batch. The thread that submits is
serial: an engine's traffic manager has one per direction, known here by the own endpoint that it posts through. What it
costs is CPU time of the real machine, so it is a timer here, as GPU compute is: ``Write.submit_ns``, set by the
machines, and ``Submitter``, which every world with a clock asks when a write may leave.

A write leaves when all its blocks have been submitted; the next is submitted while it is carried. Blocks that go to or
come from a PE's HBM are Layer Blocks, those of a DE's are Full Blocks (reference, section 4). Storage I/O costs nothing
here: its kernel-bypass interface is not what section 5.2 is about.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field

from testbed.errors import ConfigError
from testbed.ids import is_copy_endpoint
from testbed.protocol.grants import GrantRef
from testbed.protocol.machine import Write


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionCosts:
    """Costs of one emulated block, in emulated time; 0: free, so nothing waits.

    ``copies_outstanding``: writes that may be on the copy engine of one GPU and direction at once, 0: as many as
    memory has been granted for. How hard copies press the PCIe link depends on it.
    """

    copy_ns: int = 0
    work_request_ns: int = 0
    doorbell_ns: int = 0
    doorbell_batch: int = 1
    copies_outstanding: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for costs that no machine has."""
        for key in ("copy_ns", "work_request_ns", "doorbell_ns", "copies_outstanding"):
            if getattr(self, key) < 0:
                raise ConfigError(f"submission.{key} is {getattr(self, key)}, but it must not be negative.")
        if self.doorbell_batch < 1:
            raise ConfigError(f"submission.doorbell_batch is {self.doorbell_batch}, but it must be at least 1.")

    def submit_ns(self, via: str, blocks: int) -> int:
        """Time that the submitting thread of ``via`` takes for ``blocks`` blocks."""
        if is_copy_endpoint(via):
            return blocks * self.copy_ns
        return blocks * self.work_request_ns + -(-blocks // self.doorbell_batch) * self.doorbell_ns

    def window(self, via: str) -> int:
        """Writes that may be out through ``via`` at once; 0: any number."""
        return self.copies_outstanding if is_copy_endpoint(via) else 0

    def write(
        self, write_id: int, ref: GrantRef, via: str, pieces: tuple[int, ...], piece_bytes: int, *, blocks_each: int = 1
    ) -> Write:
        """A write with what its submission costs; ``blocks_each``: blocks submitted per piece."""
        submit_ns = self.submit_ns(via, len(pieces) * blocks_each)
        return Write(write_id, ref, via, pieces, piece_bytes, submit_ns=submit_ns, window=self.window(via))


@dataclass(slots=True, kw_only=True)
class SubmitCounters:
    """What one thread did. ``waited_ns``: from being asked for to leaving, summed over ``writes``."""

    writes: int = 0
    busy_ns: int = 0
    waited_ns: int = 0


@dataclass(slots=True)
class _Thread:
    """``leaves_ns``: when the head of the queue will leave; None if it has not been begun."""

    waiting: deque[tuple[Write, int]] = field(default_factory=deque)  # with the time when it was asked for
    leaves_ns: int | None = None
    out: int = 0
    counters: SubmitCounters = field(default_factory=SubmitCounters)


class Submitter:
    """The submitting threads of one role, one per own endpoint. Pure: times come in, writes come out.

    Invariants: writes through an endpoint leave in the order in which they were asked for; a thread submits one write
    at a time; at most ``window`` of its writes are out.
    """

    def __init__(self) -> None:
        self._threads: dict[str, _Thread] = {}
        self._out: dict[int, _Thread] = {}

    def ask(self, write: Write, now_ns: int) -> None:
        """Queue a write; ``take`` says when it leaves."""
        thread = self._threads.setdefault(write.via, _Thread())
        thread.waiting.append((write, now_ns))
        self._begin(thread, now_ns)

    def ended(self, write_id: int, now_ns: int) -> bool:
        """A write has completed or failed; whether it had a place in a window, which another may have now."""
        thread = self._out.pop(write_id, None)
        if thread is None:
            return False
        thread.out -= 1
        self._begin(thread, now_ns)
        return True

    def next_ns(self) -> int | None:
        """When the next write leaves, as far as is known."""
        return min((t.leaves_ns for t in self._threads.values() if t.leaves_ns is not None), default=None)

    def take(self, now_ns: int) -> list[Write]:
        """Writes that leave by now."""
        left: list[Write] = []
        for thread in self._threads.values():
            while thread.leaves_ns is not None and thread.leaves_ns <= now_ns:
                write, asked_ns = thread.waiting.popleft()
                counters, at_ns = thread.counters, thread.leaves_ns
                counters.writes += 1
                counters.busy_ns += write.submit_ns
                counters.waited_ns += at_ns - asked_ns
                thread.leaves_ns = None
                if write.window:
                    thread.out += 1
                    self._out[write.write_id] = thread
                left.append(write)
                self._begin(thread, at_ns)
        return left

    def report(self) -> dict[str, dict[str, int]]:
        """Counters by own endpoint, of those that have submitted anything."""
        return {via: asdict(thread.counters) for via, thread in self._threads.items()}

    def _begin(self, thread: _Thread, now_ns: int) -> None:
        """Submit the head of the queue, if the thread is free and the window has room."""
        if thread.leaves_ns is not None or not thread.waiting:
            return
        write, asked_ns = thread.waiting[0]
        if write.window and thread.out >= write.window:
            return
        thread.leaves_ns = max(asked_ns, now_ns) + write.submit_ns
