"""Settings for properties of which one example takes tens of milliseconds."""

from __future__ import annotations

from hypothesis import settings

# A third of a thorough run's examples, and no fewer than while writing code.
EXPENSIVE = settings(max_examples=max(50, settings.default.max_examples // 3))  # type: ignore[union-attr]
