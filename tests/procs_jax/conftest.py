"""The `jax_job` fixture: processes that share a JAX job. See pool.py for how to use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .pool import JaxJobs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def jax_job() -> Iterator[JaxJobs]:
    """Jobs kept for the whole session; `jax_job(2, 4).run(function)` runs a function in two processes of 4 devices."""
    jobs = JaxJobs()
    yield jobs
    jobs.close()
