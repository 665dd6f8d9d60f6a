"""The pure parts against models too simple to be wrong: pools, trie, grants, scheduling, packing."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from testbed.protocol.batching import Candidate, pack_forward
from testbed.protocol.pages import PagePool
from testbed.protocol.scheduling import EngineView, Waiting, select_decode, select_decode_group, select_prefill
from testbed.protocol.trie import ROOT, PrefixTrie
from tests.support.local_world import FlatCost

SETTINGS = settings(max_examples=60, derandomize=True)


class Pool(RuleBasedStateMachine):
    """A pool against a list of holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(capacity=6, page_bytes=10)
        self.holds: Counter[int] = Counter()

    @rule(count=st.integers(0, 7))
    def take(self, count: int) -> None:
        pages = self.pool.take(count)
        if count > 6 - len(self.holds):
            assert pages is None
        else:
            assert pages is not None and len(set(pages)) == count
            assert not set(pages) & set(self.holds) and all(0 <= p < 6 for p in pages)
            self.holds.update(pages)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.holds)))
        self.pool.retain((page,))
        self.holds[page] += 1

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.holds)))
        self.pool.release((page,))
        self.holds[page] -= 1
        self.holds += Counter()

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.used == len(self.holds)
        assert self.pool.free == 6 - len(self.holds)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=25, derandomize=True)


_paths = st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), max_size=12)


@SETTINGS
@given(paths=_paths, order=st.randoms(use_true_random=False), lookups=_paths)
def test_trie_is_a_set_of_paths(paths: list[tuple[int, ...]], order: object, lookups: list[tuple[int, ...]]) -> None:
    """Blocks are named by their whole path, as keys are by their prefix; they arrive in any order."""
    blocks = [path[:n] for path in paths for n in range(1, len(path) + 1)]
    order.shuffle(blocks)  # type: ignore[attr-defined]
    arrived = blocks[: len(blocks) * 2 // 3]
    key = {(): ROOT} | {b: hash(b) % 2**64 | 1 for path in (*paths, *lookups) for b in _prefixes(path)}
    trie = PrefixTrie()
    for block in arrived:
        trie.insert(key[block], key[block[:-1]])
    here = set(arrived)
    visible = {b for b in here if all(p in here for p in _prefixes(b))}
    assert len(trie) == len(visible)
    for path in (*paths, *lookups):
        expected = 0
        while expected < len(path) and path[: expected + 1] in visible:
            expected += 1
        assert trie.longest_prefix([key[b] for b in _prefixes(path)]) == expected


def _prefixes(path: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [path[:n] for n in range(1, len(path) + 1)]


_queue = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 60)), max_size=12).map(
    lambda sizes: [Waiting(f"r{i}", p, p + g, -(-(p + g) // 16) * 16) for i, (p, g) in enumerate(sizes)]
)
_engines = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 1200), st.integers(0, 60)), max_size=6
).map(lambda rows: [EngineView(f"e{i}", f"n{n}", s, t, 16 * h) for i, (n, s, t, h) in enumerate(rows)])
_read_queues = st.dictionaries(st.sampled_from(["n0", "n1", "n2", "n3"]), st.integers(0, 200))


@SETTINGS
@given(queue=_queue, engines=_engines, read_queues=_read_queues)
def test_prefill_selection(queue: list[Waiting], engines: list[EngineView], read_queues: dict[str, int]) -> None:
    before = deepcopy(engines)
    assigned = select_prefill(queue, engines, read_queues, alpha_tokens=100, beta_tokens=1000)
    assert [r for r, _ in assigned] == [w.request_id for w in queue[: len(assigned)]]  # FIFO, a prefix
    views = {e.engine: deepcopy(e) for e in before}
    for (_, engine), request in zip(assigned, queue, strict=False):
        chosen = views[engine]
        assert chosen.tokens <= 1000  # never over beta when assigned
        short = [e for e in views.values() if e.tokens <= 1000 and read_queues.get(e.node, 0) <= 100]
        if short:
            assert read_queues.get(chosen.node, 0) <= 100
        rivals = short or [e for e in views.values() if e.tokens <= 1000]
        assert chosen.tokens == min(e.tokens for e in rivals)
        chosen.tokens += request.tokens
        chosen.sequences += 1
    assert list(views.values()) == engines  # sums are conserved
    if len(assigned) < len(queue):
        assert all(e.tokens > 1000 for e in engines)


@SETTINGS
@given(queue=_queue, engines=_engines)
def test_decode_selection(queue: list[Waiting], engines: list[EngineView]) -> None:
    before = {e.engine: deepcopy(e) for e in engines}
    assigned = select_decode(queue, engines, z_factor=1.05)
    assert [r for r, _ in assigned] == [w.request_id for w in queue[: len(assigned)]]
    for engine in engines:
        mine = [w for w, (_, e) in zip(queue, assigned, strict=False) if e == engine.engine]
        was = before[engine.engine]
        assert engine.free_hbm_tokens == was.free_hbm_tokens - sum(w.hbm_tokens for w in mine) >= 0
        assert engine.tokens == was.tokens + sum(w.total_tokens for w in mine)
        assert engine.sequences == was.sequences + len(mine)
    if len(assigned) < len(queue):
        assert all(e.free_hbm_tokens < queue[len(assigned)].hbm_tokens for e in engines)


@SETTINGS
@given(queue=_queue, sums=st.dictionaries(st.sampled_from("abc"), st.integers(0, 500), min_size=1))
def test_decode_group_selection(queue: list[Waiting], sums: dict[str, int]) -> None:
    before, after = dict(sums), dict(sums)
    chosen = select_decode_group(queue, after)
    assert [r for r, _ in chosen] == [w.request_id for w in queue]  # drained, in order
    for (_, group), request in zip(chosen, queue, strict=True):
        assert before[group] == min(before.values())
        before[group] += request.total_tokens
    assert before == after


@SETTINGS
@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 60)), max_size=8),
    quota=st.integers(0, 200),
    memory=st.integers(1, 60),
    block=st.integers(1, 8),
    layers=st.integers(1, 3),
)
def test_packing(sizes: list[tuple[int, int]], quota: int, memory: int, block: int, layers: int) -> None:
    queue = [Candidate(f"r{i}", cached * block, new) for i, (cached, new) in enumerate(sizes)]
    chunks = pack_forward(
        queue,
        FlatCost(),  # one microsecond per new token
        quota_ns=quota * 1_000,
        attention_layers=layers,
        block_tokens=block,
        memory_blocks=memory,
    )
    assert [c.request_id for c in chunks] == [r.request_id for r in queue[: len(chunks)]]
    assert all(c.cached_tokens == r.cached_tokens for c, r in zip(chunks, queue, strict=False))
    assert all(c.new_tokens == r.new_tokens for c, r in zip(chunks[:-1], queue, strict=False))  # only the last is cut
    spent = layers * sum(c.new_tokens for c in chunks)
    used = sum(-(-(c.cached_tokens + c.new_tokens) // block) for c in chunks)
    assert used <= memory
    if chunks:
        last, whole = chunks[-1], queue[len(chunks) - 1].new_tokens
        assert 0 < last.new_tokens <= whole
        assert last.new_tokens == whole or last.new_tokens % block == 0
        assert spent <= quota or (len(chunks) == 1 and last.new_tokens <= block)
    if queue and memory > queue[0].cached_tokens // block:
        assert chunks  # progress
    if chunks and chunks[-1].new_tokens < queue[len(chunks) - 1].new_tokens:  # nothing more would have fitted
        rest = queue[len(chunks) - 1].new_tokens - chunks[-1].new_tokens
        more = min(block, rest)
        assert spent + layers * more > quota or used + -(-more // block) > memory
