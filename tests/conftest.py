"""Hypothesis profiles: quick while writing code, thorough and repeatable in `make test`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadlines: a shared machine makes any single example slow now and then.
settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile(
    "thorough",
    max_examples=300,
    deadline=None,
    derandomize=True,  # a red run must be red again on the next machine
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quick")
