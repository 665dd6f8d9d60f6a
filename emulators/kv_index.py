"""KV index: which Full Blocks are durable, as a trie with prefix sharing (paper A.5).

Invariant: a block is visible only after every replica is durable (the DRAM publishes it then, and only then). No
eviction: in replay the hit length is computed without one (paper A.4).
"""

from __future__ import annotations

from collections.abc import Iterable

from emulators.base import report_stray, unexpected
from testbed.ids import INDEX
from testbed.protocol import messages as m
from testbed.protocol.machine import Action, Event, Outbox, Received, Started
from testbed.protocol.trie import PrefixTrie


class KvIndex:
    """Answers prefix look-ups and takes publications. Stateless per request, hence no transition table."""

    def __init__(self, stored: Iterable[tuple[int, int]] = ()) -> None:
        """``stored``: (key, parent) of the blocks that are in storage from the start."""
        self.role = INDEX
        self.trie = PrefixTrie()
        for key, parent in stored:
            self.trie.insert(key, parent)
        self.out = Outbox()
        self.strays = 0

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Look-ups and publications; both are idempotent. Any other message ends its request by name.

        Raises:
            BugError: an event that no index asks its world for.
        """
        if isinstance(event, Received):
            message = event.message
            match message:
                case m.LookupPrefix():
                    hits = self.trie.longest_prefix(message.keys)
                    self.out.send(event.sender, m.PrefixFound(message.request_id, hits))
                case m.PublishBlock():
                    self.trie.insert(message.key, message.parent)
                    self.out.send(event.sender, m.BlockPublished(message.request_id, message.key))
                case m.AbortRequest():
                    pass
                case _:
                    self.strays += 1
                    self.out.actions.extend(report_stray(self.role, event.sender, message))
        elif not isinstance(event, Started):
            raise unexpected(self.role, event)
        return self.out.take()
