"""Byte units and how sizes are written for people."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_STEPS = ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` with a binary unit and three significant digits, exact below 1 KiB.

    Examples:
        >>> format_bytes(512), format_bytes(1536), format_bytes(5 * 2**30)
        ('512 B', '1.50 KiB', '5.00 GiB')
    """
    for step, unit in _STEPS:
        if num_bytes >= step:
            value = num_bytes / step
            digits = 2 if value < 10 else 1 if value < 100 else 0  # noqa: PLR2004
            return f"{value:.{digits}f} {unit}"
    return f"{num_bytes} B"
