"""A sequence that gets its HBM from one that has just ended must not start a step in the middle of another's results.

Found live: with Oracle a waiting sequence joins at once, while the rest of the batch had tokens still to be taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from testbed.protocol.layout import BlockLayout
from tests.support.local_world import FlatCost, ListScript, LocalWorld
from tests.support.worlds import cluster, small_params


class SlowForwards(FlatCost):
    """Many prompts end in one forward, so sequences wait for HBM."""

    def prefill_layer_time_ns(self, batch: Sequence[tuple[int, int]], layers: int = 1) -> int:
        """4 ms per layer, whatever the batch."""
        return 4_000_000 * layers

    def decode_step_time_ns(self, context_tokens: Sequence[int]) -> int:
        """5 ms per step."""
        return 5_000_000


@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_joins_between_steps_only(seed: int) -> None:
    layout = BlockLayout(model="tiny", layers=2, block_tokens=16, bytes_per_token_layer=4)
    # The later rounds fill no block, so they complete with their last token and free HBM at once.
    scripts = [ListScript(f"a{i}", ((33, 2), (1, 2 + i % 3), (1, 3)), seed=seed) for i in range(8)]
    params = small_params(layout, de_hbm_pages=9)
    world = LocalWorld(cluster(1, 1, 1), params, "oracle", scripts, seed=seed, cost=SlowForwards())
    assert not [o.error for o in world.run() if o.error]
    assert world.check_tokens() == sum(o.generate_tokens for o in world.driver.outcomes)
