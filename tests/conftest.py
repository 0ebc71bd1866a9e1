"""What all tests share: hypothesis profiles, slow mounts and servers.

The profiles: quick while writing code, thorough and repeatable in `make test`.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from tests.tools.mounts import MakeMounts, slow_mounts, why_no_mounts

pytest_plugins = ["tests.tools.remote"]

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


@pytest.fixture(scope="session")
def make_mounts() -> MakeMounts:
    """`slow_mounts`, which needs nothing installed, but the right to mount."""
    if reason := why_no_mounts():
        pytest.skip(reason)
    return slow_mounts
