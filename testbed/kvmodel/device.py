"""An emulated GPU: reads KV bytes from its HBM, writes KV bytes into it, emits tokens. Real bytes, no time.

It trusts nothing but the bytes: digests of earlier blocks are recomputed from HBM, never remembered from where the
blocks came. What it remembers per request is only what a real engine keeps: tokens, and partial sums over layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from testbed.kvmodel import content
from testbed.protocol.layout import U8, U32, U64, BlockLayout, KeyChain, seal_pieces
from testbed.protocol.machine import ComputeDecode, ComputePrefill, DecodeItem, PrefillItem


@dataclass(slots=True)
class _Sequence:
    """Running state of one sequence in decode: sum behind c, chain of keys, digests over the full blocks."""

    chain_sum: int
    keys: KeyChain
    digests: U64


@dataclass(slots=True)
class _Prompt:
    """Running state of one prompt in prefill: c_p of its tokens, and the votes of the layers done."""

    chain: U64
    votes: int = 0
    layers_done: int = field(default=0)


class KvDevice:
    """One GPU's arithmetic over ``data`` [size] (its HBM) and ``seals`` (one per Layer Block of ``data``)."""

    def __init__(
        self, layout: BlockLayout, vocab_size: int, data: U8, seals: U64, *, materialise: bool = False
    ) -> None:
        self._layout = layout
        self._vocab = vocab_size
        self._data = data
        self._seals = seals
        self._materialise = materialise  # Oracle: hits are not loaded, they are made here
        self._constants = content.layer_constants(layout, 0, layout.layers)
        self._sequences: dict[str, _Sequence] = {}
        self._prompts: dict[str, _Prompt] = {}

    # --- prefill -------------------------------------------------------------------------------------------------

    def prefill(self, action: ComputePrefill) -> dict[str, int]:
        """Layers ``[begin, end)`` of a batch: computes the misses' KV in place; tokens of prompts that ended."""
        tokens: dict[str, int] = {}
        for item in action.items:
            token = self._prefill_item(item, action.layer_begin, action.layer_end)
            if token is not None:
                tokens[item.request_id] = token
        return tokens

    def _prefill_item(self, item: PrefillItem, begin: int, end: int) -> int | None:
        layout, bt = self._layout, self._layout.block_tokens
        prompt = self._prompts.get(item.request_id)
        if prompt is None:
            prompt = _Prompt(content.token_chain(np.frombuffer(item.tokens, dtype="<u4")))
            self._prompts[item.request_id] = prompt
        cached = 0 if self._materialise else item.cached_blocks
        constants = self._constants[begin:end]
        digests = self._digest_loaded(item, cached, begin, end)
        valid = item.end_tokens % bt
        tails = np.zeros(end - begin, dtype=np.uint64)
        for k in range(cached, len(item.pieces)):
            stop = min(item.end_tokens, (k + 1) * bt)
            block = self._piece(item.pieces[k], end - begin)
            new = content.kv_bytes(layout, prompt.chain[k * bt : stop], digests, constants)
            block[:, : stop - k * bt] = new
            block[:, stop - k * bt :] = 0
            seals = self._seal(item.pieces[k], item.keys[k], begin, end)
            if stop == (k + 1) * bt:
                digests = content.fold_digests(digests, seals[None, :])
            else:
                tails = content.tail_hashes(layout, block, valid)
        if not item.emit:
            return None
        prompt.votes += content.layer_votes(digests, tails, constants)
        prompt.layers_done += end - begin
        if prompt.layers_done < layout.layers:
            return None
        del self._prompts[item.request_id]
        return content.emitted_token(prompt.votes, self._vocab)

    def _digest_loaded(self, item: PrefillItem, cached: int, begin: int, end: int) -> U64:
        """D over the loaded blocks, from their bytes in HBM."""
        size = (end - begin) * self._layout.layer_block_bytes
        seals = np.empty((cached, end - begin), dtype=np.uint64)
        for k in range(cached):
            at = item.pieces[k]
            data = self._data.data[at : at + size]
            seals[k] = seal_pieces(data, (item.keys[k],), begin, end, self._layout.layer_block_bytes)
        return content.fold_digests(np.zeros(end - begin, dtype=np.uint64), seals)

    def _piece(self, offset: int, layers: int) -> U8:
        size = layers * self._layout.layer_block_bytes
        return self._data[offset : offset + size].reshape(layers, self._layout.block_tokens, -1)

    def _seal(self, offset: int, key: int, begin: int, end: int) -> U64:
        """Seal Layer Blocks ``[begin, end)`` of the block at ``offset``; the seals are stored beside the bytes."""
        size = self._layout.layer_block_bytes
        data = self._data.data[offset : offset + (end - begin) * size]
        seals = np.array(seal_pieces(data, (key,), begin, end, size), dtype=np.uint64)
        self._seals[offset // size : offset // size + end - begin] = seals
        return seals

    # --- decode --------------------------------------------------------------------------------------------------

    def load_sequence(self, request_id: str, tokens: bytes, pages: tuple[int, ...]) -> None:
        """The prompt's KV is in HBM at ``pages``; Oracle: make it there."""
        ids: U32 = np.frombuffer(tokens, dtype="<u4")
        layout = self._layout
        keys = KeyChain(layout)
        keys.extend(ids)
        sequence = _Sequence(content.chain_sum(ids), keys, np.zeros(layout.layers, dtype=np.uint64))
        self._sequences[request_id] = sequence
        if self._materialise:
            prompt_pages = pages[: layout.blocks(len(ids))]
            item = PrefillItem(request_id, tokens, layout.keys(ids), prompt_pages, 0, len(ids), False)
            self._prefill_item(item, 0, layout.layers)
            self._prompts.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a request (idempotent)."""
        self._sequences.pop(request_id, None)
        self._prompts.pop(request_id, None)

    def decode(self, action: ComputeDecode) -> dict[str, int]:
        """One step: the token emitted by every sequence of the batch."""
        return {item.request_id: self._decode_item(item) for item in action.items}

    def _decode_item(self, item: DecodeItem) -> int:
        layout, bt = self._layout, self._layout.block_tokens
        sequence = self._sequences[item.request_id]
        sequence.keys.extend(np.array([item.token], dtype=np.uint32))
        block, slot = divmod(item.position, bt)
        if item.reread:
            self._reread(sequence, item.pages, block)
        sequence.chain_sum, chain = content.extend_chain(sequence.chain_sum, item.token)
        page = layout.view(self._data[item.pages[block] : item.pages[block] + layout.full_block_bytes])
        page[:, slot : slot + 1] = content.kv_bytes(layout, chain, sequence.digests, self._constants)
        valid = slot + 1
        tails = content.tail_hashes(layout, page, valid)
        if valid == bt:
            seals = self._seal(item.pages[block], sequence.keys.full[block], 0, layout.layers)
            sequence.digests = content.fold_digests(sequence.digests, seals[None, :])
            tails = np.zeros(layout.layers, dtype=np.uint64)
        votes = content.layer_votes(sequence.digests, tails, self._constants)
        return content.emitted_token(votes, self._vocab)

    def _reread(self, sequence: _Sequence, pages: tuple[int, ...], blocks: int) -> None:
        """D over all full blocks, from every byte of them in HBM now."""
        layout = self._layout
        seals = np.empty((blocks, layout.layers), dtype=np.uint64)
        for k in range(blocks):
            data = self._data.data[pages[k] : pages[k] + layout.full_block_bytes]
            seals[k] = seal_pieces(data, (sequence.keys.full[k],), 0, layout.layers, layout.layer_block_bytes)
        sequence.digests = content.fold_digests(np.zeros(layout.layers, dtype=np.uint64), seals)
