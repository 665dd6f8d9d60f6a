"""What prefill and decode engines share where they have collectives: shards in, parts on, and who fails by name."""

from __future__ import annotations

from emulators.base import R, RoleMachine, unexpected
from emulators.collectives import DEADLINE, ExpertGroup, Phase
from testbed.errors import PeerError
from testbed.protocol.batching import CostModel
from testbed.protocol.machine import DeadlinePassed, Event, ShardArrived
from testbed.protocol.params import ProtocolParams, SystemConfig


class GroupMember(RoleMachine[R]):
    """An engine, as far as collectives concern it. ``group`` is None where there are none.

    Subclasses say what their batch is (``has_batch``, ``batch``), and go on in ``part_over``.
    """

    def __init__(
        self,
        engine: str,
        leader: str,
        system: SystemConfig,
        params: ProtocolParams,
        cost: CostModel,
        group: ExpertGroup | None = None,
    ) -> None:
        super().__init__(engine, params)
        self.leader = leader
        self.group = group
        self.system = system
        self.cost = cost

    def has_batch(self) -> bool:
        """Whether a batch runs, or waits to be run: a round is not to be entered without it."""
        raise NotImplementedError

    def batch(self) -> list[R]:
        """Requests in the round under way."""
        raise NotImplementedError

    def part_over(self) -> None:
        """The part of the own batch is over, or a round without one."""
        raise NotImplementedError

    def go_along(self) -> None:
        """Without a batch, enter the rounds that peers have begun."""
        group = self.group
        while group is not None and group.called and not self.has_batch():
            group.join(self.out, self.now_ns)

    def part_computed(self, tokens: int) -> None:
        """Own layers of a part are computed; ``tokens`` of them go to the experts."""
        assert self.group is not None
        self._went_on(self.group.computed(tokens, self.out, self.now_ns))

    def experts_computed(self) -> None:
        """The experts' time of a part has passed."""
        assert self.group is not None
        self._went_on(self.group.experts_computed(self.out, self.now_ns))

    def on_collective(self, event: Event) -> None:
        """A shard, or a deadline: that of a barrier, or of a request that has just ended.

        Raises:
            BugError: an engine without collectives got a shard.
        """
        group = self.group
        match event:
            case ShardArrived() if group is not None:
                try:
                    over = group.arrived(event, self.out, self.now_ns)
                except PeerError as error:
                    self.strays += 1
                    self._fail_batch("UnexpectedShard", str(error))
                    over = group.resume(self.out, self.now_ns)
                self._went_on(over)
            case DeadlinePassed():
                if group is not None and event.key == DEADLINE and (late := group.late(self.out, self.now_ns)):
                    self._fail_batch("CollectiveTimedOut", late)
                    self._went_on(group.resume(self.out, self.now_ns))
            case _:
                raise unexpected(self.role, event)

    def report(self) -> dict[str, int]:
        """What was seen of collectives."""
        return self.group.figures.report() if self.group is not None else {}

    def _fail_batch(self, error: str, detail: str) -> None:
        assert self.group is not None
        if self.group.loaded and self.group.phase is not Phase.IDLE:
            for record in self.batch():
                self.fail(record, error, detail)

    def _went_on(self, over: bool) -> None:
        if over:
            self.part_over()
        self.go_along()
