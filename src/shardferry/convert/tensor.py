"""A tensor on its way through conversion rules: what it is made of, and the dtype that makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardferry.convert.ops import Stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardferry.convert.ops import Expression
    from shardferry.format.index import TensorInfo


class Tensor(NamedTuple):
    """A tensor, whole.

    Attributes:
        name: What errors call it.
        dtype: safetensors name of its dtype.
        source: How it is made of stored ones.
    """

    name: str
    dtype: str
    source: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements."""
        return self.source.shape


def stored_tensor(name: str, info: TensorInfo) -> Tensor:
    """Return a tensor of a checkpoint as it is; its name is the key of its leaf."""
    return Tensor(name, info.dtype, Stored(name, info.shape))


def stored_tensors(tensors: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint as they are, by name."""
    return {name: stored_tensor(name, info) for name, info in tensors.items()}
