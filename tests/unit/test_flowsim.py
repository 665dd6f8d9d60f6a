"""Parts of the flow simulation on cases small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from testbed.flowsim import events
from testbed.flowsim.heap import make_heap, push
from testbed.flowsim.queues import append, append_left, drop_head
from testbed.flowsim.run import FlowCase
from testbed.flowsim.state import NONE, SIDE_DE, SIDE_PE, Settings
from testbed.flowsim.transfers import _record, pump_memory, reserve, write_back
from tests.support.flow_world import FlowWorld, arrive, flow_world, settings_for

MS = 1_000_000
CASE = FlowCase(model="ds-27b", trace="32K", system="oracle", prefill_nodes=1, decode_nodes=1, agents=1)
DECODE = settings_for(
    CASE, gpus=1, unit_engines=1, decode_base_ns=10.0 * MS, decode_sequence_ns=1.0 * MS, decode_context_ns=0.0
)
"""Nothing moves; a step takes 10 ms and 1 ms more for every sequence."""
MOVING = settings_for(
    CASE,
    gpus=1,
    unit_engines=1,
    moves_kv=True,
    kv_bytes=1_000.0,
    cnic_rate=32.0,
    snic_rate=8.0,
    dram_rate=1_000.0,
    persist_ns=3 * MS,
    message_ns=0,
    read_overhead_ns=0,
    replicas=2,
    decode_base_ns=1.0 * MS,
    decode_sequence_ns=0.0,
)
"""A block is 64 kB: 2 us of a CNIC, 8 us of an SNIC."""


def decoding(settings: Settings, requests: Sequence[tuple[int, int, int]]) -> FlowWorld:
    """Requests whose prompt is in the DE buffer at a given time: (at_ns, prompt, generate); one agent each."""
    world = flow_world(settings, [[(prompt, generate)] for _, prompt, generate in requests])
    r = world.requests
    for k, (at_ns, prompt, _) in enumerate(requests):
        r.prompt[k] = prompt
        r.first[k] = at_ns
        world.cluster.pages_free[1] -= -(-prompt // 64)
        world.push(at_ns, events.BUFFERED, k)
    world.run()
    return world


# --- decode ----------------------------------------------------------------------------------------------------------


def test_a_sequence_alone_emits_a_token_per_step() -> None:
    """Five tokens: the first came with the prefill, four steps follow."""
    r = decoding(DECODE, [(1_000, 100, 5)]).requests
    assert r.second.tolist() == [1_000 + 11 * MS]
    assert r.last.tolist() == r.completed.tolist() == [1_000 + 44 * MS]


def test_who_comes_during_a_step_joins_at_its_end() -> None:
    """Steps of the first: 0-11 alone, 11-23 with the second, which has its only token then, 23-34 alone."""
    r = decoding(DECODE, [(0, 100, 4), (5 * MS, 100, 2)]).requests
    assert r.second.tolist() == [11 * MS, 23 * MS]
    assert r.last.tolist() == [34 * MS, 23 * MS]


def test_who_comes_at_the_end_of_a_step_joins_the_next() -> None:
    r = decoding(DECODE, [(0, 100, 4), (11 * MS, 100, 2)]).requests
    assert r.second.tolist() == [11 * MS, 23 * MS]
    assert r.last.tolist() == [34 * MS, 23 * MS]


def test_a_step_that_has_begun_keeps_its_length() -> None:
    """The second joins at 11 ms; the third comes during the step of both, which still ends at 23, and then is alone."""
    r = decoding(DECODE, [(0, 100, 3), (1 * MS, 100, 2), (12 * MS, 100, 2)]).requests
    assert r.last.tolist() == [23 * MS, 23 * MS, 34 * MS]


def test_many_sequences_leave_in_their_order() -> None:
    """All join at 0; with n left a step takes 10 + n ms, and sequence k needs k + 1 steps."""
    lengths = [4, 2, 6, 3, 5, 7]
    r = decoding(DECODE, [(0, 100, length + 1) for length in lengths]).requests
    ends, at, left = {}, 0, len(lengths)
    for step in range(1, max(lengths) + 1):
        at += (10 + left) * MS
        if step in lengths:
            ends[step] = at
            left -= 1
    assert r.last.tolist() == [ends[length] for length in lengths]


def test_a_step_reads_the_contexts_of_its_batch() -> None:
    """The KV of the prompt and of the token that the step continues."""
    r = decoding(DECODE._replace(decode_context_ns=1_000.0), [(0, 499, 2), (0, 1_499, 2)]).requests
    assert r.second.tolist() == [12 * MS + 500_000 + 1_500_000] * 2


def test_contexts_grow_and_go() -> None:
    """The third joins when the first has emitted three more tokens, and the second has gone."""
    settings = DECODE._replace(decode_context_ns=1_000.0)
    world = decoding(settings, [(0, 499, 30), (0, 999, 3), (40 * MS, 1_999, 2)])
    step = 12 * MS + 500_000 + 1_000_000
    assert world.requests.last[1] == 2 * step
    alone = 11 * MS + 502_000
    joined = 2 * step + alone * -(-(40 * MS - 2 * step) // alone)
    steps = 2 + (joined - 2 * step) // alone
    assert world.requests.second[2] == joined + 12 * MS + (500 + steps) * 1_000 + 2_000_000
    assert world.cluster.contexts.tolist() == world.cluster.active.tolist() == [0]


def test_a_single_token_is_never_decoded() -> None:
    world = decoding(DECODE, [(7, 100, 1)])
    r = world.requests
    assert r.second.tolist() == r.last.tolist() == r.completed.tolist() == [7]
    assert world.cluster.hbm_free.tolist() == [DECODE.de_hbm_pages]


def test_hbm_is_taken_in_order_and_returned() -> None:
    """Three pages in all: the second request needs three and waits for the first; the third, for one, waits behind."""
    world = decoding(DECODE._replace(de_hbm_pages=3), [(0, 100, 2), (1, 150, 2), (2, 30, 2)])
    r = world.requests
    assert r.last.tolist() == [11 * MS, 22 * MS, 33 * MS]
    assert world.cluster.hbm_free.tolist() == [3]
    assert world.queues.hbm.tolist() == [[NONE, NONE]]


# --- write-back and copies -------------------------------------------------------------------------------------------


def test_new_blocks_are_written_back_once_per_replica() -> None:
    """Three blocks, two replicas: six times 8 us of the SNIC, then the acknowledgement; the next wait behind."""
    world = flow_world(MOVING, [[(200, 1)], [(200, 1)]])
    s, c, _, r, _, _ = world.parts
    write_back(s, c, r, 0, 3, 1_000)
    write_back(s, c, r, 1, 1, 2_000)
    assert r.durable.tolist() == [1_000 + 48_000 + 3 * MS, 1_000 + 64_000 + 3 * MS]
    assert c.snic_tx_bytes.tolist() == [0, 8 * 64_000]
    write_back(s, c, r, 1, 0, 9 * MS)
    assert r.durable[1] == 65_000 + 3 * MS


def test_a_round_ends_when_its_blocks_are_durable() -> None:
    """130 tokens of prompt fill two blocks; with 63 more, of which the last has no KV, a third is full."""
    world = decoding(MOVING, [(0, 130, 64)])
    r, c = world.requests, world.cluster
    loaded = 3 * 2_000
    assert r.second[0] == loaded + MS
    assert r.last[0] == loaded + 63 * MS
    copied = r.last[0] + 2_000
    assert r.completed[0] == r.durable[0] == copied + 16_000 + 3 * MS
    assert c.snic_tx_bytes.tolist() == [0, 3 * 2 * 64_000]
    assert c.pages_free.tolist() == [MOVING.dram_pages] * 2


def test_the_kv_of_the_last_token_fills_no_block() -> None:
    world = decoding(MOVING, [(0, 130, 62)])
    assert world.cluster.snic_tx_bytes.tolist() == [0, 2 * 2 * 64_000]
    assert world.requests.completed[0] == world.requests.last[0]
    assert world.agents.stored_blocks.tolist() == [2]


# --- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "node"), [(SIDE_PE, 0), (SIDE_DE, 1)])
def test_hits_are_read_once_both_buffers_are_held(side: int, node: int) -> None:
    """Four blocks of hits: 32 us of the SNIC of the side that reads."""
    world = flow_world(MOVING, [[(300, 2)]])
    s, c, q, r, a, h = world.parts
    r.prompt[0], r.hit[0], r.side[0] = 300, 256, side
    append(q.memory[1], q.next_wait, 0)
    pump_memory(s, c, q, r, a, h, 1, 1_000)
    if side == SIDE_PE:
        assert (h.time_ns[0], h.kind[0], h.arg[0]) == (1_000, events.PUMP_MEMORY, 0)
        assert r.allocated[0] == -1
        pump_memory(s, c, q, r, a, h, 0, 1_000)
    assert c.pages_free.tolist() == [s.dram_pages - 4 * (side == SIDE_PE), s.dram_pages - 5]
    assert r.allocated[0] == 1_000
    assert c.snic_rx_free[node] == 33_000
    assert c.snic_rx_free[1 - node] == 0
    assert c.snic_window[0].tolist() == [256_000 * (node == 0), 256_000 * (node == 1)]
    assert (h.time_ns[h.size[0] - 1], h.kind[h.size[0] - 1]) == (33_000, events.READ_DONE)


def test_memory_is_given_in_order() -> None:
    """Ten pages: the second request needs six and waits; the third, for one, does not overtake it."""
    world = flow_world(MOVING._replace(dram_pages=10), [[(320, 2)], [(384, 2)], [(10, 2)]])
    s, c, q, r, a, h = world.parts
    r.prompt[:] = [320, 384, 10]
    for k in range(3):
        append(q.memory[1], q.next_wait, k)
    pump_memory(s, c, q, r, a, h, 1, 0)
    assert (c.pages_free[1], q.memory[1, 0], r.allocated.tolist()) == (5, 1, [0, -1, -1])
    c.pages_free[1] += 5
    pump_memory(s, c, q, r, a, h, 1, 50)
    assert (c.pages_free[1], q.memory[1, 0], r.allocated.tolist()) == (3, NONE, [0, 50, 50])


def test_a_resource_serves_one_after_the_other() -> None:
    free = np.zeros(2, np.int64)
    assert [reserve(free, 1, 10, 100.0, 4.0), reserve(free, 1, 20, 40.0, 4.0), reserve(free, 1, 90, 4.0, 4.0)] == [
        35, 45, 91
    ]  # fmt: skip
    assert free.tolist() == [0, 91]


def test_bytes_are_spread_over_the_time_they_took() -> None:
    series = np.zeros((3, 2), np.float32)
    _record(series, 1, 5, 25, 40.0, 10)
    assert series.tolist() == [[0, 10], [0, 20], [0, 10]]
    _record(series, 0, 2, 2, 7.0, 10)
    _record(series, 0, 25, 65, 8.0, 10)  # what is beyond the series belongs to its last window
    assert series[:, 0].tolist() == [7, 0, 8]


# --- rounds ----------------------------------------------------------------------------------------------------------


def test_two_rounds_of_an_agent() -> None:
    """Fetch at 1 s, one forward, then as above; the second round's hits are the full blocks of the first."""
    settings = DECODE._replace(
        fetch_ns=1_000 * MS, message_ns=0, prefill_base_ns=5.0 * MS, linear_ns=0.0, main_attention_ns=0.0,
        indexer_ns=0.0,
    )  # fmt: skip
    world = arrive(flow_world(settings, [[(100, 29), (70, 1)]]))
    world.run()
    r = world.requests
    assert r.submitted.tolist() == [0, 1_313 * MS]
    assert r.scheduled.tolist() == r.started.tolist() == [1_000 * MS, 2_000 * MS]
    assert r.first.tolist() == [1_005 * MS, 2_005 * MS]
    assert r.last.tolist() == r.completed.tolist() == [1_313 * MS, 2_005 * MS]
    assert r.prompt.tolist() == [100, 199]
    assert r.hit.tolist() == [0, 128]


def test_an_agent_may_pause_between_rounds() -> None:
    world = arrive(flow_world(DECODE._replace(tool_delay_ns=7 * MS), [[(100, 1), (70, 1)]]), [3])
    world.run()
    assert world.requests.submitted.tolist() == [3, world.requests.completed[0] + 7 * MS]


def test_hits_that_are_computed_again() -> None:
    """A quarter of nine reusable blocks: 2.25 of 9, so six whole blocks are still read."""
    world = arrive(flow_world(DECODE._replace(recompute_fraction=0.25), [[(600, 1), (70, 1)]]))
    world.run()
    assert world.requests.hit.tolist() == [0, 6 * 64]


# --- structures ------------------------------------------------------------------------------------------------------


def test_a_full_heap_is_a_bug() -> None:
    heap = make_heap(1)
    push(heap, 1, 0, 0, 0)
    with pytest.raises(IndexError, match="the event heap is full"):
        push(heap, 2, 0, 0, 0)


def test_queues_keep_their_order() -> None:
    ends, following = np.full(2, NONE, np.int32), np.full(4, NONE, np.int32)
    append_left(ends, following, 2)
    append(ends, following, 0)
    append_left(ends, following, 3)
    append(ends, following, 1)
    taken = []
    while ends[0] != NONE:
        taken.append(int(ends[0]))
        drop_head(ends, following)
    assert taken == [3, 2, 0, 1]
    assert ends.tolist() == [NONE, NONE]
    append(ends, following, 1)
    assert ends.tolist() == [1, 1]


@pytest.mark.parametrize(("forward_tokens", "forwards"), [(1 << 40, 1), (256, 2), (128, 4), (100, 6)])
def test_a_prompt_is_cut_where_a_forward_has_its_tokens(forward_tokens: int, forwards: int) -> None:
    """400 new tokens in chunks of whole blocks: with 100, five of one block and 80 tokens; a forward takes 50 ms."""
    settings = DECODE._replace(
        forward_tokens=forward_tokens, quota_ns=1 << 62, prefill_base_ns=50.0 * MS, linear_ns=0.0,
        main_attention_ns=0.0, indexer_ns=0.0, message_ns=0,
    )  # fmt: skip
    world = arrive(flow_world(settings, [[(400, 1)]]))
    world.run()
    r = world.requests
    assert r.first[0] - r.started[0] == forwards * 50 * MS
