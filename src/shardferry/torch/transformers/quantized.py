"""Quantized checkpoints of transformers: weights made whole of what is stored of them, by the names they are under.

A weight and its scales are one: the scales are taken together with it, and have no name of their own afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardferry.convert.ops import swap
from shardferry.convert.quant import dequantize
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers.quantizers.base import HfQuantizer

    from shardferry.convert.quant import Scheme


class Quantization(NamedTuple):
    """How a checkpoint is quantized.

    Attributes:
        quantizer: transformers' own, if the model keeps what is stored; None if its weights are whole.
        block: Rows and columns that share a scale of block-scaled FP8, if the configuration says so.
    """

    quantizer: HfQuantizer | None
    block: tuple[int, int] | None


class Group(NamedTuple):
    """How a quantized weight is spelled.

    Attributes:
        scheme: How it is stored.
        dtype: safetensors name of the dtype of what is called the weight.
        members: What the names of its parts end with, in the order of the scheme.
        weight: What the name of the weight ends with.
        is_transposed: Whether its last two dims are swapped in memory.
    """

    scheme: Scheme
    dtype: str
    members: tuple[str, ...]
    weight: str
    is_transposed: bool = False


# By the names that transformers (5.24, quantizers and integrations) and ModelOpt give to what they store.
GROUPS = (
    Group("nvfp4", "U8", (".weight", ".weight_scale", ".weight_scale_2"), ".weight"),
    Group("fp8", "F8_E4M3", (".weight", ".weight_scale_inv"), ".weight"),
    Group("fp8", "F8_E4M3", (".weight", ".scale"), ".weight"),
    Group("fp8", "F8_E4M3", (".weight", ".qscale_weight"), ".weight"),
    Group("mxfp4", "U8", ("_blocks", "_scales"), "", is_transposed=True),
)
# Scales of activations, which weights are computed without.
_ACTIVATIONS = (".input_scale", ".activation_scale")


class Dequantized(NamedTuple):
    """A checkpoint whose weights are whole.

    Attributes:
        tensors: By name.
        dropped: Names of scales that no weight needs.
    """

    tensors: dict[str, Tensor]
    dropped: frozenset[str]


def dequantized(tensors: Mapping[str, Tensor], block: tuple[int, int] | None) -> Dequantized:
    """Return a checkpoint's tensors with the values of quantized weights instead of what is stored of them.

    Args:
        tensors: By name.
        block: Rows and columns that share a scale of block-scaled FP8, if the configuration says so.

    Raises:
        InvalidInputError: If scales do not fit their weight, or there is no quantized weight at all.
    """
    made = dict(tensors)
    dropped = frozenset(name for name in tensors if name.endswith(_ACTIVATIONS))
    found = False
    for name, names, group in _groups(tensors):
        try:
            weight = dequantize([tensors[one] for one in names], group.scheme, block if group.scheme == "fp8" else None)
        except InvalidInputError as error:
            raise InvalidInputError(f"{', '.join(names)}: {error}") from error
        for one in names:
            made.pop(one, None)
        source = swap(weight.source, -2, -1) if group.is_transposed else weight.source
        made[name] = Tensor(name, weight.dtype, source)
        found = True
    if not found:
        known = ", ".join(sorted({group.scheme for group in GROUPS}))
        raise InvalidInputError(f"no weight is quantized in a way that can be undone by parts ({known})")
    return Dequantized({name: tensor for name, tensor in made.items() if name not in dropped}, dropped)


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, list[str], Group]]:
    taken: set[str] = set()
    for group in GROUPS:
        for name in tensors:
            stem = name.removesuffix(group.members[-1])
            names = [stem + member for member in group.members]
            is_whole = stem != name and all(one in tensors and one not in taken for one in names)
            if is_whole and tensors[names[0]].dtype == group.dtype:
                taken.update(names)
                yield stem + group.weight, names, group
