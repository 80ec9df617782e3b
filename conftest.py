"""Hypothesis profiles, shared by the tests of all packages.

`HYPOTHESIS_PROFILE=nightly` tries more examples, different in every run; by default every run tries the same ones.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

BUSY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("ci", BUSY_MACHINE, derandomize=True)
settings.register_profile("nightly", BUSY_MACHINE, derandomize=False, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
