"""The compiled rules of the flow simulation decide what ``testbed.protocol`` decides, on any queue and any load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.flowsim import events
from testbed.flowsim.heap import drop_first as drop
from testbed.flowsim.heap import make_heap, push
from testbed.flowsim.prefill import _pack, attention_ns
from testbed.flowsim.queues import append
from testbed.flowsim.run import FlowCase
from testbed.flowsim.selection import (
    _chosen,
    _fetch_decode,
    _fetch_prefill,
    _fitting,
    _spread,
    choose_decode,
    choose_prefill,
    hbm_need,
)
from testbed.flowsim.state import NONE, SIDE_DE, SIDE_PE, Settings, make_agents
from testbed.flowsim.transfers import tier_keep
from testbed.models.model import MODELS, ModelSpec
from testbed.protocol.batching import Candidate, pack_forward
from testbed.protocol.scheduling import (
    EngineView,
    Waiting,
    select_decode,
    select_decode_group,
    select_prefill,
    select_side,
)
from tests.support.flow_world import FlowWorld, flow_world, settings_for

EXAMPLES = settings(max_examples=100, derandomize=True)
BLOCK = 64
TOKENS = st.one_of(st.just(0), st.integers(0, 5_000))
LENGTHS = st.tuples(
    st.builds(lambda blocks, rest: blocks * BLOCK + rest, st.integers(0, 40), st.sampled_from([1, 2, 33, 63, 64])),
    st.sampled_from([1, 2, 31, 64, 600]),
)
"""Prompt and generation of a request, often at the edge of a block."""
SETTINGS = settings_for(
    FlowCase(model="ds-27b", trace="32K", system="dualpath", prefill_nodes=2, decode_nodes=3, agents=1), gpus=3
)


def waiting_world(lengths: Sequence[tuple[int, int]], **changed: Any) -> FlowWorld:
    """Requests of known prompts, submitted and nowhere yet."""
    world = flow_world(SETTINGS._replace(unit_engines=1, **changed), [[pair] for pair in lengths], windows=2)
    world.requests.prompt[:] = [prompt for prompt, _ in lengths]
    return world


def waiting(lengths: Sequence[tuple[int, int]]) -> list[Waiting]:
    """The same requests as the protocol sees them; their names are their numbers."""
    return [
        Waiting(str(k), prompt, prompt + generate, -(-(prompt + generate - 1) // BLOCK) * BLOCK)
        for k, (prompt, generate) in enumerate(lengths)
    ]


def queued(head: int, following: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> list[int]:
    """The members of a queue."""
    members = []
    while head != NONE:
        members.append(int(head))
        head = int(following[head])
    return members


# --- who prefills, who decodes, who reads ----------------------------------------------------------------------------


@EXAMPLES
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=12),
    tokens=st.lists(TOKENS, min_size=6, max_size=6),
    reads=st.lists(TOKENS, min_size=2, max_size=2),
    alpha=TOKENS,
    beta=TOKENS,
)
def test_prefill_engines_are_chosen_by_algorithm_1(
    lengths: list[tuple[int, int]], tokens: list[int], reads: list[int], alpha: int, beta: int
) -> None:
    views = [EngineView(str(e), f"pe{e // 3}", 0, tokens[e]) for e in range(6)]
    queues = {"pe0": reads[0], "pe1": reads[1]}
    one = select_prefill(waiting(lengths)[:1], [EngineView(v.engine, v.node, 0, v.tokens) for v in views], queues,
                         alpha_tokens=alpha, beta_tokens=beta)  # fmt: skip
    chosen = choose_prefill(np.array(tokens), np.array(reads), 3, alpha, beta)
    assert [chosen] == [int(engine) for _, engine in one] or (chosen == NONE and not one)

    expected = select_prefill(waiting(lengths), views, queues, alpha_tokens=alpha, beta_tokens=beta)
    world = waiting_world(lengths, alpha_tokens=alpha, beta_tokens=beta)
    s, c, q, r, a, h = world.parts
    c.pe_tokens[:] = tokens
    c.read_queue[:2] = reads
    for k in range(len(lengths)):
        append(q.prefill, q.next_prefill, k)
    _fetch_prefill(s, c, q, r, a, h, 0)
    assert [(str(k), str(r.prefill_engine[k])) for k in range(len(expected))] == expected
    assert queued(q.prefill[0], q.next_prefill) == list(range(len(expected), len(lengths)))
    assert c.pe_tokens.tolist() == [v.tokens for v in views]


@EXAMPLES
@given(lengths=st.lists(LENGTHS, max_size=12), loads=st.lists(TOKENS, min_size=3, max_size=3))
def test_requests_are_spread_over_decode_groups_as_in_the_first_level(
    lengths: list[tuple[int, int]], loads: list[int]
) -> None:
    groups = {str(g): loads[g] for g in range(3)}
    expected = select_decode_group(waiting(lengths), groups)
    world = waiting_world(lengths or [(1, 1)])
    s, c, q, r, _, _ = world.parts
    c.group_tokens[:] = loads
    for k in range(len(lengths)):
        append(q.decode, q.next_decode, k)
    _spread(s, c, q, r)
    for group in range(3):
        members = [int(name) for name, to in expected if to == str(group)]
        assert queued(q.private[group, 0], q.next_decode) == members
    assert c.group_tokens.tolist() == list(groups.values())
    assert q.decode.tolist() == [NONE, NONE]


@EXAMPLES
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=12),
    tokens=st.lists(TOKENS, min_size=3, max_size=3),
    sequences=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    pages=st.lists(st.integers(0, 120), min_size=3, max_size=3),
    z_factor=st.sampled_from([0.5, 1.0, 1.05, 3.0]),
)
def test_decode_engines_are_chosen_as_in_the_second_level(
    lengths: list[tuple[int, int]], tokens: list[int], sequences: list[int], pages: list[int], z_factor: float
) -> None:
    views = [EngineView(str(e), "de1", sequences[e], tokens[e], pages[e] * BLOCK) for e in range(3)]
    expected = select_decode(waiting(lengths), views, z_factor=z_factor)
    world = waiting_world(lengths, z_factor=z_factor)
    s, c, q, r, a, h = world.parts
    mine = slice(3, 6)  # the second of three groups
    c.de_tokens[mine], c.de_sequences[mine], c.hbm_unplanned[mine] = tokens, sequences, pages
    for k in range(len(lengths)):
        append(q.private[1], q.next_decode, k)
    _fetch_decode(s, c, q, r, a, h, 1, 0)
    assert [(str(k), str(r.decode_engine[k] - 3)) for k in range(len(expected))] == expected
    assert queued(q.private[1, 0], q.next_decode) == list(range(len(expected), len(lengths)))
    assert c.de_tokens[mine].tolist() == [v.tokens for v in views]
    assert c.de_sequences[mine].tolist() == [v.sequences for v in views]


@EXAMPLES
@given(
    length=LENGTHS,
    tokens=st.lists(st.one_of(st.just(0), TOKENS), min_size=3, max_size=3),
    sequences=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    spare=st.lists(st.integers(-1, 1), min_size=3, max_size=3),
    z_factor=st.sampled_from([1.05, 3.0]),
)
def test_one_request_at_the_edge_of_memory_and_of_z(
    length: tuple[int, int], tokens: list[int], sequences: list[int], spare: list[int], z_factor: float
) -> None:
    """``spare``: pages beyond what the request needs. With empty engines and a factor of 3, Z is its length."""
    world = waiting_world([length])
    append(world.queues.private[1], world.queues.next_decode, 0)
    request = waiting([length])[0]
    need, total = request.hbm_tokens // BLOCK, request.total_tokens
    assert hbm_need(world.settings, world.requests, 0) == need
    pages = [max(0, need + k) for k in spare]
    fitting = _fitting(world.settings, world.queues, world.requests, 1, sum(pages))
    assert fitting == (total if need <= sum(pages) else 0)
    views = [EngineView(str(e), "de1", sequences[e], tokens[e], pages[e] * BLOCK) for e in range(3)]
    expected = select_decode([request], views, z_factor=z_factor)
    z = z_factor * (fitting + sum(tokens)) / 3
    chosen = choose_decode(np.array(tokens), np.array(sequences), np.array(pages), need, total, z)
    assert chosen == (int(expected[0][1]) if expected else NONE)


@EXAMPLES
@given(prefill_queue=st.integers(0, 3), decode_queue=st.integers(0, 3), hits=st.integers(0, 2))
def test_the_side_with_the_shorter_queue_reads(prefill_queue: int, decode_queue: int, hits: int) -> None:
    world = waiting_world([(1_000, 10)])
    s, c, q, r, a, h = world.parts
    r.hit[0], r.prefill_engine[0], r.decode_engine[0], r.chosen[0] = hits * BLOCK, 4, 2, 1
    c.read_queue[1], c.read_queue[2] = prefill_queue, decode_queue
    _chosen(s, c, q, r, a, h, 0, 2, 5)
    wanted = {"pe": SIDE_PE, "de": SIDE_DE}[select_side(prefill_queue, decode_queue)] if hits else 0
    assert (r.side[0], r.scheduled[0]) == (wanted, 5)
    assert c.read_queue.tolist() == [
        0, prefill_queue + hits * BLOCK * (wanted == SIDE_PE), decode_queue + hits * BLOCK * (wanted == SIDE_DE), 0, 0
    ]  # fmt: skip


# --- what a forward costs and holds ----------------------------------------------------------------------------------


@EXAMPLES
@given(
    model=st.sampled_from(sorted(MODELS)),
    cached=st.integers(0, 60_000),
    new=st.integers(1, 60_000),
    rate=st.sampled_from([1.0, 204_000.0]),
)
def test_attention_takes_the_models_flops(model: str, cached: int, new: int, rate: float) -> None:
    spec = MODELS[model]
    got = attention_ns(flop_settings(spec, rate), cached, new)
    assert abs(got - spec.attention_flops(cached, new) / rate) <= 1e-12 * got


def flop_settings(spec: ModelSpec, rate: float = 1.0, **changed: Any) -> Settings:
    """Settings in which one ns of attention is ``rate`` FLOPs; with 1 all sums are exact."""
    main = 2 * spec.layers * spec.attention_heads * (spec.attention_qk_dim + spec.attention_v_dim)
    indexer = 2 * spec.layers * spec.indexer_heads * spec.indexer_dim
    values: dict[str, Any] = dict(
        main_attention_ns=main / rate, indexer_ns=indexer / rate, top_k=spec.attention_top_k or 0
    )
    return SETTINGS._replace(**{**values, **changed})


class Flops:
    """A cost model whose nanoseconds are FLOPs of attention, all layers."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    def attention_layer_time_ns(self, batch: Sequence[tuple[int, int]]) -> int:
        """FLOPs."""
        return sum(self.model.attention_flops(cached, new) for cached, new in batch)

    def prefill_layer_time_ns(self, batch: Sequence[tuple[int, int]], layers: int = 1) -> int:
        """Not asked for."""
        raise AssertionError

    def decode_step_time_ns(self, context_tokens: Sequence[int]) -> int:
        """Not asked for."""
        raise AssertionError


@EXAMPLES
@given(
    model=st.sampled_from(sorted(MODELS)),
    prompts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3_000)), min_size=1, max_size=8),
    quota_tokens=st.integers(0, 8_000),
    memory=st.integers(0, 200),
)
def test_forwards_are_packed_as_the_protocol_packs_them(
    model: str, prompts: list[tuple[int, int]], quota_tokens: int, memory: int
) -> None:
    """``prompts``: blocks cached, tokens to compute. The quota is worth the attention of one prompt without hits."""
    spec = MODELS[model]
    quota = spec.attention_flops(0, quota_tokens)
    candidates = [Candidate(str(k), blocks * BLOCK, new) for k, (blocks, new) in enumerate(prompts)]
    expected = pack_forward(
        candidates, Flops(spec), quota_ns=quota, attention_layers=1, block_tokens=BLOCK, memory_blocks=memory
    )
    world = waiting_world([(c.cached_tokens + c.new_tokens, 1) for c in candidates])
    s, c, q, r = flop_settings(spec, quota_ns=quota, pe_batch_blocks=memory, unit_engines=1), *world.parts[1:4]
    r.computed[:] = [candidate.cached_tokens for candidate in candidates]
    for k in range(len(candidates)):
        append(q.runnable[2], q.next_wait, k)
    used = _pack(s, c, q, r, 2)
    count = int(c.item_count[2])
    got = zip(c.item_request[2, :count], c.item_cached[2, :count], c.item_new[2, :count], strict=True)
    assert [(str(k), cached, new) for k, cached, new in got] == [
        (chunk.request_id, chunk.cached_tokens, chunk.new_tokens) for chunk in expected
    ]
    assert used == sum(spec.attention_flops(chunk.cached_tokens, chunk.new_tokens) for chunk in expected)
    assert queued(q.runnable[2, 0], q.next_wait) == list(range(count, len(candidates)))


# --- structures ------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(st.lists(st.one_of(st.integers(0, 9), st.none()), max_size=60))
def test_the_heap_is_ordered_by_time_then_by_age(steps: list[int | None]) -> None:
    """A number is pushed as a time, None takes the first."""
    heap = make_heap(64)
    model: list[tuple[int, int]] = []
    for k, step in enumerate(steps):
        if step is not None:
            push(heap, step, events.TICK, k, 7 * k)
            model.append((step, k))
        elif model:
            first = min(model)
            model.remove(first)
            assert (heap.time_ns[0], heap.arg[0], heap.stamp[0]) == (*first, 7 * first[1])
            drop(heap)
        assert heap.size[0] == len(model)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=40))
def test_the_dram_tier_keeps_the_most_recently_used(uses: list[tuple[int, int]]) -> None:
    """An agent uses all its KV: in the tier it stays, at the price of the least recently used; what is too big goes."""
    settings = SETTINGS._replace(tier_bytes=20.0)
    agents = make_agents(np.arange(7, dtype=np.int64))
    model: OrderedDict[int, int] = OrderedDict()
    for agent, size in uses:
        tier_keep(settings, agents, agent, 2.0 * size)
        model.pop(agent, None)
        if 2 * size <= 20:
            while sum(model.values()) + 2 * size > 20:
                model.popitem(last=False)
            model[agent] = 2 * size
        assert [k for k in range(6) if agents.newer[k] != NONE] == sorted(model)
        assert agents.tier_used[0] == sum(model.values())
        order = [int(agents.newer[6])]
        while order[-1] != 6:
            order.append(int(agents.newer[order[-1]]))
        assert order[:-1] == list(model)
