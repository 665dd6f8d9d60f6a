"""An emulated GPU of the sim world: which blocks its HBM holds, and the tokens that it emits; no KV.

A token is a function of all tokens before it, as it is in the live world, so that equal contexts go on equally and
share blocks. It is the right one only if every block that the computation uses is in HBM at its place: a wrong block
shows as wrong tokens. ``expected_tokens`` is the reference.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import xxhash

from testbed.fabric.sim.memory import TaggedMemory
from testbed.protocol.layout import U32, BlockLayout
from testbed.protocol.machine import ComputeDecode, ComputePrefill, DecodeItem, PrefillItem

_NEXT = struct.Struct("<QI")
_TOKEN = struct.Struct("<I")
_digest = xxhash.xxh3_64_intdigest


def expected_tokens(layout: BlockLayout, vocab_size: int, prompt: bytes, count: int) -> list[int]:
    """What must be emitted for a prompt (uint32 ids, little endian)."""
    state = _digest(prompt, layout.fingerprint)
    tokens = [state % vocab_size]
    while len(tokens) < count:
        state = _digest(_NEXT.pack(state, tokens[-1]))
        tokens.append(state % vocab_size)
    return tokens


@dataclass(slots=True)
class _Sequence:
    """One sequence in decode. ``keys``: of the full blocks; ``tail``: of the prompt's partial block, 0 if none;
    ``chain``: hash behind the keys; ``pending``: tokens of the block being filled."""

    state: int
    keys: list[int]
    tail: int
    chain: xxhash.xxh3_64
    pending: bytearray


@dataclass(slots=True)
class GpuUse:
    """What the GPU did."""

    computes: int = 0
    busy_ns: int = 0


@dataclass(slots=True)
class SimGpu:
    """One GPU over its HBM. ``materialise`` (Oracle): hits are not loaded, they are made here."""

    layout: BlockLayout
    vocab_size: int
    hbm: TaggedMemory
    materialise: bool
    free_ns: int = 0
    use: GpuUse = field(default_factory=GpuUse)
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _spoilt: dict[str, None] = field(default_factory=dict)
    """Prompts that were computed from a block that was not theirs."""

    def finish_ns(self, now_ns: int, duration_ns: int) -> int:
        """One compute at a time: when one that is submitted now ends."""
        self.free_ns = max(self.free_ns, now_ns) + duration_ns
        self.use.computes += 1
        self.use.busy_ns += duration_ns
        return self.free_ns

    # --- prefill -------------------------------------------------------------------------------------------------

    def prefill(self, action: ComputePrefill) -> dict[str, int]:
        """Layers ``[begin, end)`` of a batch; tokens of the prompts that ended."""
        tokens: dict[str, int] = {}
        last = action.layer_end == self.layout.layers
        for item in action.items:
            self._prefill_item(item, action.layer_begin, action.layer_end)
            if item.emit and last:
                state = _digest(item.tokens, self.layout.fingerprint)
                if item.request_id in self._spoilt:
                    del self._spoilt[item.request_id]
                    state += 1
                tokens[item.request_id] = state % self.vocab_size
        return tokens

    def _prefill_item(self, item: PrefillItem, begin: int, end: int) -> None:
        cached = 0 if self.materialise else item.cached_blocks
        if cached and not self.hbm.holds(item.pieces[:cached], item.keys[:cached], begin, end):
            self._spoilt[item.request_id] = None
        if len(item.pieces) > cached:
            self.hbm.put(item.pieces[cached:], item.keys[cached:], begin, end)

    # --- decode --------------------------------------------------------------------------------------------------

    def load_sequence(self, request_id: str, tokens: bytes, pages: tuple[int, ...]) -> None:
        """The prompt's KV is in HBM at ``pages``; Oracle: make it there."""
        step, fingerprint = 4 * self.layout.block_tokens, self.layout.fingerprint
        chain = xxhash.xxh3_64(seed=fingerprint)
        whole = len(tokens) // step * step
        keys = []
        for at in range(0, whole, step):
            chain.update(tokens[at : at + step])
            keys.append(chain.intdigest())
        pending = tokens[whole:]
        tail = 0
        if pending:
            partial = chain.copy()
            partial.update(pending)
            tail = partial.intdigest()
        if self.materialise:
            all_keys = [*keys, tail] if tail else keys
            self.hbm.put(pages[: len(all_keys)], all_keys, 0, self.layout.layers)
        self._sequences[request_id] = _Sequence(_digest(tokens, fingerprint), keys, tail, chain, bytearray(pending))

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a request (idempotent)."""
        self._sequences.pop(request_id, None)
        self._spoilt.pop(request_id, None)

    def decode(self, action: ComputeDecode) -> dict[str, int]:
        """One step: the token emitted by every sequence of the batch."""
        tokens: dict[str, int] = {}
        step, vocab_size = 4 * self.layout.block_tokens, self.vocab_size
        for item in action.items:
            sequence = self._sequences[item.request_id]
            if item.reread:
                self._reread(sequence, item)
            sequence.state = _digest(_NEXT.pack(sequence.state, item.token))
            sequence.pending += _TOKEN.pack(item.token)
            if len(sequence.pending) == step:
                self._fill(sequence, item)
            tokens[item.request_id] = sequence.state % vocab_size
        return tokens

    def _fill(self, sequence: _Sequence, item: DecodeItem) -> None:
        """The block is full: it has a key now."""
        sequence.chain.update(bytes(sequence.pending))
        sequence.pending.clear()
        sequence.tail = 0
        key = sequence.chain.intdigest()
        self.hbm.put((item.pages[len(sequence.keys)],), (key,), 0, self.layout.layers)
        sequence.keys.append(key)

    def _reread(self, sequence: _Sequence, item: DecodeItem) -> None:
        """Every block that this step reads is the one expected, or the sequence goes on wrongly."""
        keys = [*sequence.keys, sequence.tail] if sequence.tail else sequence.keys
        if not self.hbm.holds(item.pages[: len(keys)], keys, 0, self.layout.layers):
            sequence.state += 1


def prompt_bytes(ids: U32) -> bytes:
    """A prompt as machines carry it: uint32 ids, little endian."""
    return ids.astype("<u4").tobytes()
