"""Live tests: marked ``live``, skipped with the exact reason on a host without namespaces or tc."""

from __future__ import annotations

import pytest

from tests.live.sandboxed import skip_unless_live


@pytest.fixture(autouse=True)
def _live_host(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("live"):
        skip_unless_live()
