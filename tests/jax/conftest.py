"""One process with eight devices on the CPU: JAX looks at the environment when it first looks for devices."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
