"""Runs simulations over processes and remembers their summaries, so that figures share cells (section 7).

Invariants: a case is simulated once per lab, whoever asks for it and however often; a summary depends on its case
alone, not on the number of workers or on the order of completion.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from types import MappingProxyType

from testbed.errors import HostError, TestbedError
from testbed.fabric.live.syscalls import die_with_parent
from testbed.flowsim.run import FlowCase, FlowResult, simulate
from testbed.paper.cases import describe, expected_requests
from testbed.paper.summary import CaseSummary, blank, reduce

Simulate = Callable[[FlowCase], FlowResult]
Report = Callable[[str, float], None]

STAGE = "simulating"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A simulation that ended. ``took_s``: wall time, by which nothing but speed is judged.

    ``error``: why it gave nothing (the summary is blank then), or empty. One cell must not spoil an hour of others.
    """

    summary: CaseSummary
    took_s: float
    error: str = ""


@dataclass(slots=True, kw_only=True)
class Lab:
    """Simulations by case. ``simulate`` must be a function of a module when there is more than one worker."""

    workers: int
    report: Report
    simulate: Simulate = simulate
    _done: dict[FlowCase, Done] = field(default_factory=dict)

    @property
    def done(self) -> Mapping[FlowCase, Done]:
        """Everything simulated so far."""
        return MappingProxyType(self._done)

    def __call__(self, case: FlowCase) -> CaseSummary:
        """The summary of a case, simulated now if it is not there yet."""
        if case not in self._done:
            self._done[case] = _work(self.simulate, case)
        return self._done[case].summary

    def run(self, cases: Iterable[FlowCase]) -> None:
        """Simulate what is not there yet, the longest first.

        Raises:
            HostError: a worker was killed.
        """
        todo = sorted(set(cases) - self._done.keys(), key=lambda case: (-expected_requests(case), describe(case)))
        progress = _Progress(report=self.report, total=sum(map(expected_requests, todo)))
        if todo:
            self.report(STAGE, 0.0)
        if self.workers == 1:
            for case in todo:
                self(case)
                progress.add(case)
        elif todo:
            self._spread(todo, progress)

    def _spread(self, todo: list[FlowCase], progress: _Progress) -> None:
        pool = ProcessPoolExecutor(
            min(self.workers, len(todo)),
            mp_context=multiprocessing.get_context("fork"),
            initializer=_begin,
            initargs=(os.getpid(),),
        )
        try:
            waiting: dict[Future[Done], FlowCase] = {pool.submit(_work, self.simulate, case): case for case in todo}
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    case = waiting.pop(future)
                    self._done[case] = future.result()
                    progress.add(case)
        except BrokenProcessPool as error:
            raise HostError(
                "a simulation was killed, most likely for lack of memory; use fewer --workers, or --quick."
            ) from error
        except BaseException:
            for process in multiprocessing.active_children():  # an interrupted command must not wait for minutes
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(slots=True, kw_only=True)
class _Progress:
    report: Report
    total: float
    _so_far: float = 0.0

    def add(self, case: FlowCase) -> None:
        self._so_far += expected_requests(case)
        self.report(STAGE, self._so_far / self.total)


def _begin(parent: int) -> None:
    """In a worker: it just ends when Ctrl-C reaches the whole group (the parent tells of it), and with its parent.

    A simulation holds the interpreter for minutes, so the kernel has to end it, not a thread.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(1)


def _work(simulate_case: Simulate, case: FlowCase) -> Done:
    began = time.monotonic()
    try:
        summary, sentence = reduce(simulate_case(case)), ""
    except TestbedError as error:
        summary, sentence = blank(case), str(error)
    return Done(summary=summary, took_s=time.monotonic() - began, error=sentence)
