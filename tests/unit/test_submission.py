"""What submission costs (paper 5.2), against the paper's figures and what follows from them; and who may leave when."""

from __future__ import annotations

import pytest

from testbed.errors import ConfigError
from testbed.models.model import model_named
from testbed.models.scale import PAPER_BLOCK_TOKENS, Scale
from testbed.protocol.grants import GrantRef
from testbed.protocol.machine import Write
from testbed.protocol.submission import SubmissionCosts, Submitter
from testbed.units import NS_PER_MS, NS_PER_S, NS_PER_US

LAYER_BLOCK_BYTES = 41_984
"""DeepSeek-V3.2, 64 tokens."""
CONTEXT_TOKENS = 32_721
PCIE, CNIC = "pe0.copy0", "pe0.cnic0"


def layer_blocks() -> int:
    model = model_named("ds-660b")
    return -(-CONTEXT_TOKENS // PAPER_BLOCK_TOKENS) * model.layers


def post(write_id: int, via: str, submit_ns: int, window: int = 0) -> Write:
    return Write(write_id, GrantRef("pe0gpu0.copy", write_id, 1, 8), via, (0,), 8, submit_ns=submit_ns, window=window)


@pytest.mark.parametrize(("copy_us", "total_ms"), [(5, 156), (7, 218)])
def test_a_request_of_the_paper_copied_one_by_one(copy_us: int, total_ms: int) -> None:
    assert layer_blocks() == pytest.approx(31_200, rel=0.002)
    assert SubmissionCosts(copy_ns=copy_us * NS_PER_US).submit_ns(PCIE, layer_blocks()) / NS_PER_MS == pytest.approx(
        total_ms, rel=0.005
    )


def test_a_request_of_the_paper_by_rdma() -> None:
    one = SubmissionCosts(work_request_ns=200, doorbell_ns=800)
    assert one.submit_ns(CNIC, layer_blocks()) / NS_PER_MS == pytest.approx(31, rel=0.01)
    batched = SubmissionCosts(work_request_ns=200, doorbell_ns=800, doorbell_batch=8)
    assert batched.submit_ns(CNIC, 16) == 16 * 200 + 2 * 800
    assert batched.submit_ns(CNIC, 17) == 17 * 200 + 3 * 800  # the last batch is not full, and rung for all the same
    assert batched.submit_ns(PCIE, 17) == 0  # no doorbells on the copy engine


@pytest.mark.parametrize(
    ("costs", "via", "least", "most"),
    [
        (SubmissionCosts(copy_ns=7_000), PCIE, 5.9, 6.1),
        (SubmissionCosts(copy_ns=5_000), PCIE, 8.3, 8.5),
        (SubmissionCosts(work_request_ns=200, doorbell_ns=800), CNIC, 41.8, 42.2),
        (SubmissionCosts(), CNIC, 49.5, 50.5),
    ],
)
def test_the_rate_that_submission_leaves_of_50_gb_per_s(
    costs: SubmissionCosts, via: str, least: float, most: float
) -> None:
    """Layer Blocks one by one over a link that carries one in 0.84 us: the slower of thread and link decides."""
    submitter, count, link_ns = Submitter(), 1_000, round(LAYER_BLOCK_BYTES * NS_PER_S / 50e9)
    assert link_ns == 840
    for k in range(count):
        submitter.ask(post(k, via, costs.submit_ns(via, 1)), 0)
    ended_ns = 0
    while (at_ns := submitter.next_ns()) is not None:
        for _ in submitter.take(at_ns):
            ended_ns = max(ended_ns, at_ns) + link_ns
    assert least < count * LAYER_BLOCK_BYTES / ended_ns < most  # bytes per ns are GB/s


def test_a_thread_is_serial_and_endpoints_are_not() -> None:
    submitter = Submitter()
    for k, via in enumerate((PCIE, PCIE, CNIC)):
        submitter.ask(post(k, via, 10), 5)
    assert submitter.next_ns() == 15 and submitter.take(14) == []
    assert [w.write_id for w in submitter.take(15)] == [0, 2]
    assert [w.write_id for w in submitter.take(40)] == [1] and submitter.next_ns() is None
    submitter.ask(post(3, PCIE, 10), 100)  # idle meanwhile
    assert submitter.next_ns() == 110
    assert submitter.report()[PCIE] == {"writes": 2, "busy_ns": 20, "waited_ns": 10 + 20}


def test_a_window_holds_copies_back_until_one_has_ended() -> None:
    submitter = Submitter()
    for k in range(3):
        submitter.ask(post(k, PCIE, 10, window=1), 0)
    assert [w.write_id for w in submitter.take(100)] == [0] and submitter.next_ns() is None
    assert not submitter.ended(7, 100)
    assert submitter.ended(0, 100) and submitter.next_ns() == 110
    assert [w.write_id for w in submitter.take(110)] == [1]


def test_costs_stand_for_agents_and_gpus_at_the_time_scale() -> None:
    scale = Scale(bandwidth_scale=4_000, time_scale=24.4, agents_scale=4, gpus_scale=2).fit(model_named("ds-660b"))
    assert scale.emulated_submission_ns(6e-6) == pytest.approx(6_000 * 2 * float(scale.time_scale), rel=1e-4)


def test_costs_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"submission\.doorbell_batch is 0"):
        SubmissionCosts(doorbell_batch=0)
    with pytest.raises(ConfigError, match=r"submission\.copies_outstanding is -1"):
        SubmissionCosts(copies_outstanding=-1)


def test_a_late_look_loses_no_time() -> None:
    submitter = Submitter()
    for k in range(3):
        submitter.ask(post(k, PCIE, 10), 0)
    assert [w.write_id for w in submitter.take(29)] == [0, 1] and submitter.next_ns() == 30
