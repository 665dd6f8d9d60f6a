"""The oracle: what an agent must receive, computed in one process, without blocks in flight, caches, or roles.

Plain on purpose: it holds the whole context of one agent in one array and applies the KV function (content.py) token
by token during decode. The emulated cluster must emit exactly these tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from testbed.kvmodel import content
from testbed.protocol.layout import U8, U32, U64, BlockLayout, seal_pieces


class ReferenceModel:
    """One agent's conversation: append a prompt, generate tokens, append again."""

    def __init__(self, layout: BlockLayout, vocab_size: int) -> None:
        self._layout = layout
        self._vocab = vocab_size
        self._constants = content.layer_constants(layout, 0, layout.layers)
        self.tokens: U32 = np.empty(0, dtype=np.uint32)
        self._digests: U64 = np.zeros(layout.layers, dtype=np.uint64)  # over the full blocks
        self._tail: U8 = np.zeros((layout.layers, layout.block_tokens, layout.bytes_per_token_layer), dtype=np.uint8)
        self._done = 0  # positions whose KV exists

    def generate(self, append: U32, count: int) -> list[int]:
        """Append ``append`` [n] to the context and generate ``count`` tokens, which join the context too."""
        self.tokens = np.concatenate([self.tokens, append.astype(np.uint32)])
        emitted: list[int] = []
        for _ in range(count):
            self._extend()
            valid = self._done % self._layout.block_tokens
            tails = content.tail_hashes(self._layout, self._tail, valid)
            token = content.emitted_token(content.layer_votes(self._digests, tails, self._constants), self._vocab)
            emitted.append(token)
            self.tokens = np.append(self.tokens, np.uint32(token))
        return emitted

    def _extend(self) -> None:
        """Compute the KV of all tokens that have none yet, block by block."""
        layout, chain = self._layout, content.token_chain(self.tokens)
        while self._done < len(self.tokens):
            block, slot = divmod(self._done, layout.block_tokens)
            end = min(len(self.tokens), (block + 1) * layout.block_tokens)
            new = content.kv_bytes(layout, chain[self._done : end], self._digests, self._constants)
            self._tail[:, slot : slot + end - self._done] = new
            self._done = end
            if end == (block + 1) * layout.block_tokens:
                key = layout.keys(self.tokens[:end])[-1]
                data = self._tail.reshape(-1).data
                seals = seal_pieces(data, [key], 0, layout.layers, layout.layer_block_bytes)
                self._digests = content.fold_digests(self._digests, np.array([seals], dtype=np.uint64))
                self._tail[:] = 0


def reference_turns(layout: BlockLayout, vocab_size: int, turns: Iterable[tuple[U32, int]]) -> Iterator[list[int]]:
    """Tokens of every turn of one agent; ``turns`` yields (appended token ids, tokens to generate)."""
    model = ReferenceModel(layout, vocab_size)
    for append, count in turns:
        yield model.generate(append, count)
