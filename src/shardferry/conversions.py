"""Conversion rules: how a checkpoint's names and shapes become a model's, for `conversions=` and `repack --rules`.

from shardferry.conversions import AddPrefix, Concatenate, Convert, Rename, Stack, StripPrefix
"""

from __future__ import annotations

from shardferry.convert.rules import AddPrefix, Convert, Rename, Rule, StripPrefix, reverse_rules
from shardferry.convert.steps import (
    Chunk,
    Concatenate,
    Custom,
    Deinterleave,
    Dequantize,
    Interleave,
    Pad,
    Permute,
    Reshape,
    Rope,
    Split,
    Stack,
    Step,
    Transpose,
    Unpad,
    Unrope,
    Unstack,
)

__all__ = [
    "AddPrefix",
    "Chunk",
    "Concatenate",
    "Convert",
    "Custom",
    "Deinterleave",
    "Dequantize",
    "Interleave",
    "Pad",
    "Permute",
    "Rename",
    "Reshape",
    "Rope",
    "Rule",
    "Split",
    "Stack",
    "Step",
    "StripPrefix",
    "Transpose",
    "Unpad",
    "Unrope",
    "Unstack",
    "reverse_rules",
]
