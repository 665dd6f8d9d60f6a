"""The KV function: bytes that only the right tokens and the right earlier KV can produce.

With 64-bit wrapping arithmetic, for token id t_p at position p, layer l, block k = p // block_tokens:

* c_p   = mix(c_{p-1} * R + t_p + 1), computed for a whole prompt at once as a polynomial hash: depends on all tokens.
* D_k,l = D_{k-1,l} * R + x_k,l with x_k,l the seal of Layer Block (k, l): depends on every KV byte before block k+1.
* KV    = mix(c_p + D_{k-1,l} + L_l + j * PHI) for each 8-byte word j: the bytes of token p at layer l.
* token = sum over layers of mix(D_{n-1,l} * R + tail_l + L_l), folded to the vocabulary, where tail_l hashes the valid
  bytes of the block being filled: depends on every KV byte of every layer.

So a stale, misplaced, truncated or torn block changes all later KV and all later tokens. It is not attention; it keeps
the two properties of attention that a transfer protocol can be wrong about: what is computed depends on all that was
loaded, in order, and what is stored depends on what was computed.
"""

from __future__ import annotations

import numpy as np
import xxhash

from testbed.protocol.layout import MASK64, U8, U32, U64, BlockLayout

PHI = 0x9E3779B97F4A7C15
RADIX = 0xD1342543DE82EF95  # odd, hence invertible: distinct histories stay distinct
_RADIX_INVERSE = pow(RADIX, -1, 1 << 64)
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: U64) -> U64:
    """The splitmix64 finaliser, elementwise, in place on a fresh array."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(_M1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_M2)
    x ^= x >> np.uint64(31)
    return x


def powers(base: int, count: int) -> U64:
    """``base ** [0, count)`` modulo 2**64."""
    result: U64 = np.full(count, base, dtype=np.uint64)
    if count:
        result[0] = 1
        np.multiply.accumulate(result, out=result)
    return result


def token_chain(tokens: U32) -> U64:
    """c_p for every position of ``tokens`` [n] -> [n]: a hash of all tokens up to and including p."""
    n = len(tokens)
    terms = mix(tokens.astype(np.uint64) + np.uint64(1)) * powers(_RADIX_INVERSE, n)
    return mix(np.cumsum(terms, dtype=np.uint64) * powers(RADIX, n))


def chain_sum(tokens: U32) -> int:
    """The running sum behind c of the last position: S_p = S_{p-1} * R + mix(t_p + 1), c_p = mix(S_p)."""
    n = len(tokens)
    if not n:
        return 0
    weights = powers(RADIX, n)[::-1]
    return int((mix(tokens.astype(np.uint64) + np.uint64(1)) * weights).sum(dtype=np.uint64))


def extend_chain(running: int, token: int) -> tuple[int, U64]:
    """One more token: the new running sum, and c of its position [1]."""
    term = int(mix(np.array([token + 1], dtype=np.uint64))[0])
    running = (running * RADIX + term) & MASK64
    return running, mix(np.array([running], dtype=np.uint64))


def layer_constants(layout: BlockLayout, layer_begin: int, layer_end: int) -> U64:
    """L_l for layers ``[begin, end)``."""
    layers = np.arange(layer_begin + 1, layer_end + 1, dtype=np.uint64)
    return mix(layers * np.uint64(PHI) + np.uint64(layout.fingerprint))


def fold_digests(start: U64, seals: U64) -> U64:
    """D after blocks whose seals are ``seals`` [blocks, layers], from ``start`` [layers]."""
    n = len(seals)
    weights = powers(RADIX, n + 1)
    folded: U64 = start * weights[n] + (seals * weights[:n][::-1, None]).sum(axis=0, dtype=np.uint64)
    return folded


def kv_bytes(layout: BlockLayout, chain: U64, digests: U64, constants: U64) -> U8:
    """KV of consecutive tokens of one block.

    ``chain`` [tokens] is c_p, ``digests`` and ``constants`` [layers] are D_{k-1} and L.
    Result: [layers, tokens, bytes_per_token_layer].
    """
    words = -(-layout.bytes_per_token_layer // 8)
    steps = np.arange(words, dtype=np.uint64) * np.uint64(PHI)
    seeds = (digests + constants)[:, None] + chain[None, :]
    raw = mix(seeds[:, :, None] + steps).view(np.uint8)
    return raw[:, :, : layout.bytes_per_token_layer]


def tail_hashes(layout: BlockLayout, block: U8, valid_tokens: int) -> U64:
    """Hash of the valid bytes of the block being filled, per layer: ``block`` [layers, tokens, bytes] -> [layers]."""
    if not valid_tokens:
        return np.zeros(len(block), dtype=np.uint64)
    return np.array([xxhash.xxh3_64_intdigest(layer[:valid_tokens]) for layer in block], dtype=np.uint64)


def layer_votes(digests: U64, tails: U64, constants: U64) -> int:
    """What some layers contribute to the emitted token: [layers] each -> 64-bit integer."""
    return int(mix(digests * np.uint64(RADIX) + tails + constants).sum(dtype=np.uint64))


def emitted_token(votes: int, vocab_size: int) -> int:
    """The token that the sum of all layers' votes selects."""
    return int(mix(np.array([votes & MASK64], dtype=np.uint64))[0]) % vocab_size
