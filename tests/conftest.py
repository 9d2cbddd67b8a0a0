"""Settings of every test run."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Files are written and processes started inside properties: the time of one example says nothing.
settings.register_profile("ci", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
