"""What options and arguments may be that only JAX's calls have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from shardferry.execute.options import KINDS, Kind, choice


def _is_dtype(value: object) -> bool:
    with suppress(TypeError):
        np.dtype(value)  # type: ignore[call-overload]  # anything may be given
        return value is not None  # NumPy takes it for float64
    return False


JAX_KINDS: Mapping[str, Kind] = {
    **KINDS,
    "cast": choice(False, True, "integers"),  # noqa: FBT003 - these are the values
    "dtype": Kind("a dtype", _is_dtype).or_none(),
    "names": Kind(
        "a mapping or a function of key paths", lambda value: isinstance(value, Mapping) or callable(value)
    ).or_none(),
}
