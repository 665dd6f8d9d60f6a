"""The index: prefixes from the root, blocks in any order, nothing seen before its parent."""

from __future__ import annotations

import itertools

import pytest

from testbed.protocol.trie import ROOT, PrefixTrie

#        1 - 2 - 3
#          \ 4
PARENTS = {1: ROOT, 2: 1, 3: 2, 4: 1}


def test_prefix_is_hit_up_to_the_first_missing_block() -> None:
    trie = PrefixTrie()
    assert trie.longest_prefix([1, 2, 3]) == 0
    trie.insert(1, ROOT)
    trie.insert(2, 1)
    assert trie.longest_prefix([1, 2, 3]) == 2
    assert trie.longest_prefix([1, 4]) == 1
    assert trie.longest_prefix([2]) == 0  # in the trie, but not below the root
    assert trie.longest_prefix([]) == 0
    assert trie.longest_prefix([2, 1]) == 0


def test_trajectories_share_the_nodes_of_their_prefix() -> None:
    trie = PrefixTrie()
    for key, parent in PARENTS.items():
        trie.insert(key, parent)
    assert len(trie) == 4
    assert [trie.depth(k) for k in PARENTS] == [1, 2, 3, 2]
    assert trie.longest_prefix([1, 2, 3]) == 3 and trie.longest_prefix([1, 4]) == 2


@pytest.mark.parametrize("order", list(itertools.permutations(PARENTS)))
def test_any_order_of_arrival_and_repeats(order: tuple[int, ...]) -> None:
    trie = PrefixTrie()
    here: set[int] = set()
    for key in order:
        trie.insert(key, PARENTS[key])
        trie.insert(key, PARENTS[key])
        here.add(key)
        visible = {k for k in here if all(a in here for a in _path(k))}
        assert {k for k in PARENTS if k in trie} == visible
        assert len(trie) == len(visible)
        for leaf in PARENTS:
            path = _path(leaf)
            expected = next((i for i, k in enumerate(path) if k not in visible), len(path))
            assert trie.longest_prefix(path) == expected


def _path(key: int) -> list[int]:
    path: list[int] = []
    while key != ROOT:
        path.insert(0, key)
        key = PARENTS[key]
    return path


def test_depth_of_a_block_that_is_not_there() -> None:
    trie = PrefixTrie()
    trie.insert(2, 1)  # its parent is missing
    with pytest.raises(KeyError):
        trie.depth(2)
