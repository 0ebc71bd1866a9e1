"""Tensors computed by a user's function from whole tensors: the slow way that always works."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardferry.convert.values import Values, values_of
from shardferry.errors import InvalidInputError
from shardferry.format.dtypes import BITS
from shardferry.geometry.region import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardferry.geometry.region import Region

logger = logging.getLogger(__name__)

# What NumPy has a type for; other dtypes are handed over as their bits.
_NUMBERS: dict[str, type[np.generic]] = {
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "BOOL": np.bool_,
    "C64": np.complex64,
}


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """A function of whole operands.

    Attributes:
        function: What is called.
        dtypes: Of the operands, as safetensors names.
        shape: Shape the result must have.
        dtype: Its dtype, as a safetensors name.
    """

    function: Callable[[list[NDArray[Any]]], NDArray[Any]] = field(hash=False)  # a callable need not have one
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    name: str = "custom"
    whole: bool = True

    def needs(self, shapes: Sequence[tuple[int, ...]], region: Region) -> tuple[Region, ...]:  # noqa: ARG002 - a Function
        """Return all of every operand."""
        return tuple(whole(shape) for shape in shapes)

    def compute(
        self,
        operands: Sequence[NDArray[np.generic]],
        shapes: Sequence[tuple[int, ...]],  # noqa: ARG002 - a Function
        region: Region,
    ) -> Values:
        """Return a region of what the function makes of the operands.

        Raises:
            InvalidInputError: If that has another shape or width than the rule says.
        """
        logger.warning("computing %s %s with a function of whole tensors", self.dtype, self.shape)
        numbers = [
            array.view(_NUMBERS.get(name, array.dtype)) for array, name in zip(operands, self.dtypes, strict=True)
        ]
        result: NDArray[np.generic] = self.function(numbers)
        if result.shape != self.shape or result.itemsize * 8 != BITS[self.dtype]:
            raise InvalidInputError(
                f"a custom function returned {result.dtype} of shape {list(result.shape)}, not {self.dtype} of "
                f"{list(self.shape)} as its rule says"
            )
        for dim, held in enumerate(region.dims):
            result = np.take(result, np.concatenate([np.arange(start, stop) for start, stop in held]), axis=dim)
        # In memory, and byte order, of its own: a function may return a view of what nobody may write to.
        return values_of(np.require(result, result.dtype.newbyteorder("="), ("C", "W")))
