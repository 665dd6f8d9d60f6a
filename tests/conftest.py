"""What holds for every test: a host that is slow for a moment is no failure of a property."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("shared host", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared host")
