"""The KV function: device and reference agree, a naive rewriting agrees with both, and every byte of KV counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash

from testbed.kvmodel.device import KvDevice
from testbed.kvmodel.reference import ReferenceModel
from testbed.protocol.layout import BlockLayout
from testbed.protocol.machine import ComputeDecode, ComputePrefill, DecodeItem, PrefillItem

VOCAB = 1 << 30  # so large that two different tokens are never equal by chance
LAYOUT = BlockLayout(model="tiny", layers=2, block_tokens=3, bytes_per_token_layer=11)
BT, FB, LB = LAYOUT.block_tokens, LAYOUT.full_block_bytes, LAYOUT.layer_block_bytes
PROMPT = np.array([5, 9, 9, 1, 0, 77, 123456, 2], dtype=np.uint32)


# --- a naive rewriting of content.py's docstring, in Python integers ----------------------------------------------

M64 = (1 << 64) - 1
R, PHI = 0xD1342543DE82EF95, 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & M64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & M64
    return x ^ (x >> 31)


def _naive(tokens: list[int], count: int) -> list[int]:
    """Tokens emitted after a context, from the definitions alone."""
    tokens, emitted = list(tokens), []
    constants = [_mix(((layer + 1) * PHI + LAYOUT.fingerprint) & M64) for layer in range(LAYOUT.layers)]
    for _ in range(count):
        running, chain = 0, []
        for token in tokens:  # c_p: the sum of mix(t_i + 1) * R**(p - i), mixed
            running = (running * R + _mix(token + 1)) & M64
            chain.append(_mix(running))
        votes = 0
        for layer in range(LAYOUT.layers):
            digest, tail = 0, 0
            for begin in range(0, len(tokens), BT):
                chunk, data = range(begin, min(begin + BT, len(tokens))), b""
                for p in chunk:
                    seed = chain[p] + digest + constants[layer]
                    words = [_mix((seed + j * PHI) & M64).to_bytes(8, "little") for j in range(2)]
                    data += b"".join(words)[: LAYOUT.bytes_per_token_layer]
                if len(chunk) == BT:
                    key = xxhash.xxh3_64(
                        b"".join(t.to_bytes(4, "little") for t in tokens[: begin + BT]), seed=LAYOUT.fingerprint
                    ).intdigest()
                    seal = xxhash.xxh3_64_intdigest(data, (key + (layer + 1) * PHI) & M64)
                    digest = (digest * R + seal) & M64
                else:
                    tail = xxhash.xxh3_64_intdigest(data)
            votes += _mix((digest * R + tail + constants[layer]) & M64)
        emitted.append(_mix(votes & M64) % VOCAB)
        tokens.append(emitted[-1])
    return emitted


# --- a prefill and a decode GPU with a wire between them ----------------------------------------------------------


@dataclass
class _Bench:
    """One PE with one layer per step, one DE, and the Full Blocks between them in ``buffer``."""

    hits: int = 0
    chunks: tuple[int, ...] = ()
    step: int = 1
    buffer: np.ndarray = field(default_factory=lambda: np.zeros(16 * FB, dtype=np.uint8))

    def prefill(self, prompt: np.ndarray) -> int:
        """Prefill, in chunks; hits are read from the buffer, everything computed goes there."""
        token: int | None = None
        data = np.zeros(16 * self.step * LB, dtype=np.uint8)
        device = KvDevice(LAYOUT, VOCAB, data, np.zeros(16 * self.step, dtype=np.uint64))
        keys, cached = LAYOUT.keys(prompt), self.hits * BT
        for end in (*self.chunks, len(prompt)):
            blocks = LAYOUT.blocks(end)
            for begin in range(0, LAYOUT.layers, self.step):
                after = min(begin + self.step, LAYOUT.layers)
                pieces = tuple(k * self.step * LB for k in range(blocks))
                for k in range(blocks):
                    source = self.buffer[k * FB + begin * LB : k * FB + after * LB]
                    target = data[pieces[k] : pieces[k] + len(source)]
                    target[:] = source if k < cached // BT else 0xAA  # what was there before must not matter
                emit = end == len(prompt)
                item = PrefillItem("r", prompt.tobytes(), keys[:blocks], pieces, cached // BT, end, emit)
                tokens = device.prefill(ComputePrefill(1, 0, begin, after, (item,)))
                for k in range(cached // BT, blocks):
                    size = (after - begin) * LB
                    self.buffer[k * FB + begin * LB :][:size] = data[pieces[k] :][:size]
                assert bool(tokens) == (emit and after == LAYOUT.layers)
                token = tokens.get("r", token)
            cached = end
        assert token is not None
        return token

    def decode(self, prompt: np.ndarray, first: int, count: int, *, reread: bool = False) -> list[int]:
        """Decode ``count`` tokens behind the first, over the buffer's bytes."""
        data = self.buffer.copy()
        device = KvDevice(LAYOUT, VOCAB, data, np.zeros(len(data) // LB, dtype=np.uint64))
        pages = tuple(range(0, len(data), FB))
        device.load_sequence("r", prompt.tobytes(), pages)
        emitted = [first]
        for k in range(count):
            item = DecodeItem("r", emitted[-1], len(prompt) + k, pages, reread or k == 0)
            emitted.append(device.decode(ComputeDecode(1, 0, (item,)))["r"])
        self.buffer = data
        return emitted


def _reference(prompt: np.ndarray, count: int) -> list[int]:
    return ReferenceModel(LAYOUT, VOCAB).generate(prompt, count)


@pytest.mark.parametrize("length", range(1, 9))
def test_naive_reference_and_device_agree(length: int) -> None:
    prompt = PROMPT[:length]
    expected = _naive(prompt.tolist(), 8)
    assert _reference(prompt, 8) == expected
    bench = _Bench()
    assert bench.decode(prompt, bench.prefill(prompt), 7) == expected


@pytest.mark.parametrize("chunks", [(3,), (6,), (3, 6)])
@pytest.mark.parametrize("step", [1, 2])
def test_chunked_prefill_and_layer_groups_change_nothing(chunks: tuple[int, ...], step: int) -> None:
    bench = _Bench(chunks=chunks, step=step)
    assert bench.decode(PROMPT, bench.prefill(PROMPT), 5) == _reference(PROMPT, 6)


@pytest.mark.parametrize("hits", [1, 2])
def test_hits_and_recomputation_are_the_same_bytes(hits: int) -> None:
    computed = _Bench()
    first = computed.prefill(PROMPT)
    loaded = _Bench(hits=hits, buffer=computed.buffer.copy())
    loaded.buffer[hits * FB :] = 0
    assert loaded.prefill(PROMPT) == first
    assert loaded.buffer[: 3 * FB].tolist() == computed.buffer[: 3 * FB].tolist()


def test_unfilled_places_of_a_tail_hold_nothing_of_others() -> None:
    bench = _Bench()  # its HBM is full of 0xAA
    bench.prefill(PROMPT)
    tail = LAYOUT.view(bench.buffer[2 * FB : 3 * FB])
    assert tail[:, :2].any(axis=(1, 2)).all() and not tail[:, 2:].any()


def test_turns_append_to_the_same_context() -> None:
    model = ReferenceModel(LAYOUT, VOCAB)
    first = model.generate(PROMPT[:4], 3)
    second = model.generate(PROMPT[4:], 3)
    context = np.concatenate([PROMPT[:4], np.array(first, dtype=np.uint32), PROMPT[4:]])
    assert second == _reference(context, 3)


def test_every_byte_of_a_hit_changes_the_first_token() -> None:
    clean = _Bench()
    first = clean.prefill(PROMPT)
    for byte in range(2 * FB):
        dirty = _Bench(hits=2, buffer=clean.buffer.copy())
        dirty.buffer[byte] ^= 1
        assert dirty.prefill(PROMPT) != first, f"byte {byte} of the hits does not matter"


@pytest.mark.parametrize("token", [0, 3, 5])
def test_every_byte_in_hbm_changes_a_later_token(token: int) -> None:
    """8 tokens of prompt: 2 full blocks, and a tail with 2 of 3 tokens; a step rereads everything."""
    bench = _Bench()
    first = bench.prefill(PROMPT)
    clean, buffer = bench.decode(PROMPT, first, token + 1, reread=True), _Bench()
    buffer.prefill(PROMPT)
    valid = [b for b in range(3 * FB) if b < 2 * FB or (b - 2 * FB) % LB < 2 * LAYOUT.bytes_per_token_layer]
    for byte in valid:
        dirty = _Bench(buffer=buffer.buffer.copy())
        dirty.buffer[byte] ^= 0x80
        assert dirty.decode(PROMPT, first, token + 1, reread=True) != clean, f"byte {byte} of HBM does not matter"


def test_swapped_blocks_change_the_token() -> None:
    bench = _Bench()
    first = bench.prefill(PROMPT)
    swapped = _Bench(hits=2, buffer=bench.buffer.copy())
    swapped.buffer[:FB], swapped.buffer[FB : 2 * FB] = bench.buffer[FB : 2 * FB], bench.buffer[:FB]
    assert swapped.prefill(PROMPT) != first


def test_forgotten_requests_leave_nothing_and_start_anew() -> None:
    data = np.zeros(4 * LB, dtype=np.uint8)
    device = KvDevice(LAYOUT, VOCAB, data, np.zeros(4, dtype=np.uint64))
    item = PrefillItem("r", PROMPT[:3].tobytes(), LAYOUT.keys(PROMPT[:3]), (0,), 0, 3, True)
    device.prefill(ComputePrefill(1, 0, 0, 1, (item,)))  # aborted after its first layer
    device.forget("r")
    device.forget("r")
    device.prefill(ComputePrefill(2, 0, 0, 1, (item,)))
    assert device.prefill(ComputePrefill(3, 0, 1, 2, (item,))) == {"r": _reference(PROMPT[:3], 1)[0]}
    assert device.prefill(ComputePrefill(4, 0, 0, 1, (item,))) == {}


def test_oracle_makes_the_bytes_that_others_load() -> None:
    bench = _Bench()
    first = bench.prefill(PROMPT)
    data = np.full(4 * FB, 0xAA, dtype=np.uint8)
    device = KvDevice(LAYOUT, VOCAB, data, np.zeros(4 * LAYOUT.layers, dtype=np.uint64), materialise=True)
    pages = tuple(range(0, 4 * FB, FB))
    device.load_sequence("r", PROMPT.tobytes(), pages)
    assert data[: 2 * FB].tolist() == bench.buffer[: 2 * FB].tolist()
    item = DecodeItem("r", first, len(PROMPT), pages, reread=True)
    assert device.decode(ComputeDecode(1, 0, (item,)))["r"] == _reference(PROMPT, 2)[1]
