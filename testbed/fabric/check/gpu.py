"""A GPU that computes provenance instead of KV: it reads cells, writes cells, and emits tokens made of what it read.

It remembers per request what the emulated GPU of the other worlds remembers (votes of layers, tokens), nothing else.
Every cell that it reads is shown to the provenance checker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from testbed.fabric.check.checkers import provenance
from testbed.fabric.check.content import Cell, right_cells, token_of, vote
from testbed.fabric.check.memory import CellMemory
from testbed.protocol.layout import BlockLayout
from testbed.protocol.machine import ComputeDecode, ComputePrefill, DecodeItem, LoadSequence, PrefillItem


@dataclass(slots=True)
class CheckGpu:
    """State of one GPU: sums of votes of prompts in prefill, tokens of sequences in decode."""

    layout: BlockLayout
    votes: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, bytes] = field(default_factory=dict)

    def prefill(self, action: ComputePrefill, memory: CellMemory, wrong: list[str]) -> dict[str, int]:
        """Layers ``[begin, end)`` of a batch; result: tokens of prompts that ended. ``wrong``: what was misread."""
        tokens: dict[str, int] = {}
        for item in action.items:
            for layer in range(action.layer_begin, action.layer_end):
                cells = list(self._prefill_layer(item, layer, layer - action.layer_begin, memory, wrong))
                self.votes[item.request_id] = self.votes.get(item.request_id, 0) + vote(cells)
            if action.layer_end == self.layout.layers:
                votes = self.votes.pop(item.request_id)
                if item.emit:
                    tokens[item.request_id] = token_of(votes)
        return tokens

    def _prefill_layer(
        self, item: PrefillItem, layer: int, within: int, memory: CellMemory, wrong: list[str]
    ) -> Iterator[Cell]:
        only = range(layer, layer + 1)
        for block, piece in enumerate(item.pieces):
            offset = piece + within * self.layout.layer_block_bytes
            right = right_cells(self.layout, item.tokens, block, item.end_tokens, only)[0]
            if block >= item.cached_blocks:
                memory.write(offset, (right,), wrong)
            found = memory.read(offset, 1)[0]
            wrong += provenance.at_compute(f"prefill of {item.request_id}", block, found, right)
            yield found

    def load(self, action: LoadSequence) -> None:
        """The sequence's prompt is in HBM: remember its tokens to extend it."""
        self.sequences[action.request_id] = action.tokens

    def forget(self, request_id: str) -> None:
        """Forget a sequence or prompt."""
        self.sequences.pop(request_id, None)
        self.votes.pop(request_id, None)

    def decode(self, action: ComputeDecode, memory: CellMemory, wrong: list[str]) -> dict[str, int]:
        """One step of a batch: a token per sequence."""
        return {item.request_id: self._decode_item(item, memory, wrong) for item in action.items}

    def _decode_item(self, item: DecodeItem, memory: CellMemory, wrong: list[str]) -> int:
        layout, tokens = self.layout, self.sequences[item.request_id]
        if len(tokens) // 4 != item.position:
            wrong.append(f"decode of {item.request_id} at position {item.position} after {len(tokens) // 4} tokens")
        tokens += item.token.to_bytes(4, "little")
        self.sequences[item.request_id] = tokens
        last, layers = item.position // layout.block_tokens, range(layout.layers)
        columns: list[tuple[Cell, ...]] = []
        for block in range(last + 1):
            page, right = item.pages[block], right_cells(layout, tokens, block, item.position + 1, layers)
            if block == last:
                if item.position % layout.block_tokens:  # it extends what the page holds already
                    before = right_cells(layout, tokens, block, item.position, layers)
                    wrong += self._compare(item, block, memory.read(page, layout.layers), before)
                memory.write(page, right, wrong)
            found = memory.read(page, layout.layers)
            wrong += self._compare(item, block, found, right)
            columns.append(found)
        return token_of(sum(vote([column[layer] for column in columns]) for layer in layers))

    def _compare(self, item: DecodeItem, block: int, found: tuple[Cell, ...], right: tuple[Cell, ...]) -> Iterator[str]:
        for one, other in zip(found, right, strict=True):
            yield from provenance.at_compute(f"decode of {item.request_id}", block, one, other)
