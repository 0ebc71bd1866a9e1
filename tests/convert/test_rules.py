"""Rules turn the table of a checkpoint's tensors into a model's, and back, or say by name why not."""

from __future__ import annotations

import pytest

from shardferry.conversions import (
    AddPrefix,
    Chunk,
    Concatenate,
    Convert,
    Deinterleave,
    Dequantize,
    Interleave,
    Pad,
    Permute,
    Rename,
    Reshape,
    Rope,
    Rule,
    Split,
    Stack,
    Step,
    StripPrefix,
    Transpose,
    Unpad,
    Unstack,
    reverse_rules,
)
from shardferry.convert.ops import Stored, leaves
from shardferry.convert.steps import inverse
from shardferry.convert.table import Converted, apply_rules, describe_rule
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError

Shapes = dict[str, tuple[int, ...]]

GATE_UP = Convert(
    ("{head*}.experts.{e}.w1.weight", "{head*}.experts.{e}.w3.weight"),
    ("{head*}.experts.gate_up_proj",),
    (Stack(0), Concatenate(1)),
)
MOE: tuple[Rule, ...] = (
    StripPrefix("module."),
    Rename(r"\.block_sparse_moe\.", ".mlp."),
    GATE_UP,
    Convert(("{head*}.experts.{e}.w2.weight",), ("{head*}.experts.down_proj",), (Stack(0),)),
)


def table(shapes: Shapes, dtype: str = "BF16") -> dict[str, Tensor]:
    return {name: Tensor(name, dtype, Stored(name, shape)) for name, shape in shapes.items()}


def shapes_of(converted: Converted) -> Shapes:
    return {name: tensor.shape for name, tensor in converted.tensors.items()}


def moe_checkpoint(experts: int = 12) -> Shapes:
    shapes: Shapes = {}
    for expert in sorted(range(experts), key=str):
        head = f"module.layers.0.block_sparse_moe.experts.{expert}"
        shapes |= {f"{head}.w1.weight": (6, 5), f"{head}.w2.weight": (5, 6), f"{head}.w3.weight": (6, 5)}
    return {**shapes, "module.norm.weight": (5,)}


def test_experts_are_stacked_in_numeric_order_whatever_the_order_of_the_file() -> None:
    converted = apply_rules(table(moe_checkpoint()), MOE)
    assert shapes_of(converted) == {
        "norm.weight": (5,),
        "layers.0.mlp.experts.gate_up_proj": (12, 12, 5),
        "layers.0.mlp.experts.down_proj": (12, 5, 6),
    }
    down = converted.tensors["layers.0.mlp.experts.down_proj"].source
    assert [leaf.key.split(".")[5] for leaf in leaves(down)] == [str(at) for at in range(12)]
    assert (converted.unmatched, converted.left) == ((), ())


def test_reversed_rules_give_the_checkpoint_again_and_then_change_nothing() -> None:
    model = shapes_of(apply_rules(table(moe_checkpoint()), MOE))
    back = reverse_rules(MOE)
    once = apply_rules(table(model), back)
    assert shapes_of(once) == moe_checkpoint()
    twice = apply_rules(table(shapes_of(once)), back)
    assert shapes_of(twice) == moe_checkpoint()
    assert len(twice.unmatched) == len(back)
    assert reverse_rules(back)[2] == GATE_UP


def test_a_rule_that_matches_nothing_is_reported() -> None:
    converted = apply_rules(table({"a": (2,)}), [Rename("b", "c"), StripPrefix("model."), GATE_UP])
    assert [describe_rule(rule).split()[0] for rule in converted.unmatched] == [
        "rename",
        "strip",
        "{head*}.experts.{e}.w1.weight",
    ]


def test_a_prefix_is_added_once_and_never_where_it_does_not_belong() -> None:
    rules = [StripPrefix("model.", besides=("lm_head.",))]
    hub: Shapes = {"model.norm.weight": (2,), "lm_head.weight": (2,)}
    model = shapes_of(apply_rules(table(hub), rules))
    assert model == {"norm.weight": (2,), "lm_head.weight": (2,)}
    assert shapes_of(apply_rules(table(model), reverse_rules(rules))) == hub
    assert shapes_of(apply_rules(table(hub), [AddPrefix("model.", ("lm_head.",))])) == hub


def test_fused_rows_are_split_by_sizes_and_joined_again() -> None:
    rule = Convert(
        ("{head*}.qkv.{kind}",), ("{head*}.q.{kind}", "{head*}.k.{kind}", "{head*}.v.{kind}"), (Split(0, (8, 2, 2)),)
    )
    hub: Shapes = {"a.qkv.weight": (12, 3), "a.qkv.bias": (12,)}
    model = shapes_of(apply_rules(table(hub), [rule]))
    assert model == {
        **{f"a.{x}.weight": (n, 3) for x, n in (("q", 8), ("k", 2), ("v", 2))},
        **{f"a.{x}.bias": (n,) for x, n in (("q", 8), ("k", 2), ("v", 2))},
    }
    assert shapes_of(apply_rules(table(model), reverse_rules([rule]))) == hub


def test_regular_expressions_with_named_groups_are_sources_too() -> None:
    rule = Convert((r"re:(?P<head>.*)\.(?:fc1|w1)\.weight",), ("{head}.up.weight",), (Transpose(),))
    assert shapes_of(apply_rules(table({"a.fc1.weight": (2, 3), "b.w1.weight": (4, 5)}), [rule])) == {
        "a.up.weight": (3, 2),
        "b.up.weight": (5, 4),
    }
    with pytest.raises(InvalidInputError, match="cannot be made from"):
        reverse_rules([rule])


def test_an_incomplete_group_is_refused_or_left_alone() -> None:
    pair = ("{head*}.weight", "{head*}.weight_scale_inv")
    tensors = table({"norm.weight": (4,)}) | {
        "w.weight": Tensor("", "F8_E4M3", Stored("w.weight", (256, 256))),
        "w.weight_scale_inv": Tensor("", "F32", Stored("w.weight_scale_inv", (2, 2))),
    }
    rule = Convert(pair, ("{head*}.weight",), (Dequantize("fp8"),), partial=True)
    converted = apply_rules(tensors, [rule])
    assert {name: tensor.dtype for name, tensor in converted.tensors.items()} == {
        "norm.weight": "BF16",
        "w.weight": "F32",
    }
    with pytest.raises(InvalidInputError, match=r"norm.weight_scale_inv is missing, but norm.weight is there"):
        apply_rules(tensors, [Convert(pair, ("{head*}.weight",), (Dequantize("fp8"),))])


@pytest.mark.parametrize(
    "sibling", ["gate_up_proj_scale", "gate_up_proj.weight_scale", "gate_up_proj.weight_scale_inv"]
)
def test_what_belongs_to_a_converted_tensor_and_is_left_is_named(sibling: str) -> None:
    model = table({"l.experts.gate_up_proj": (3, 8, 5), f"l.experts.{sibling}": (3, 8), "l.experts_bias": (3,)})
    assert apply_rules(model, reverse_rules([GATE_UP])).left == (f"l.experts.{sibling}",)


@pytest.mark.parametrize(
    ("shapes", "rule", "words"),
    [
        ({"gate_up": (7, 4)}, Convert(("gate_up",), ("a", "b"), (Chunk(0),)), ["gate_up", "7", "divisible"]),
        ({"gate_up": ()}, Convert(("gate_up",), ("a", "b"), (Chunk(0),)), ["gate_up", "no dim 0"]),
        (
            {f"experts.{i}.w": (2, 2) for i in (0, 1, 3)},
            Convert(("experts.{i}.w",), ("experts",), (Stack(0),)),
            ["experts.2.w is missing"],
        ),
        (
            {"experts.0.w": (2, 2), "experts.1.w": (2, 3)},
            Convert(("experts.{i}.w",), ("experts",), (Stack(0),)),
            ["experts.1.w", "shape"],
        ),
        ({"a.w": (2,), "b.w": (2,)}, Rename("^[ab]", "x"), ["a.w", "b.w", "x.w"]),
        ({"a": (2,), "b": (2,)}, Convert(("a",), ("b",)), ["a", "b", "would both become b"]),
        ({"a": (2,), "b": (3, 2)}, Convert(("a", "b"), ("c",), (Concatenate(0),)), ["b", "[3, 2]"]),
        ({"a": (2,), "b": (2,)}, Convert(("a", "b"), ("c",), (Concatenate(0, (2, 3)),)), ["a", "sizes"]),
        ({"a": (2,)}, Convert(("a",), ("b", "c")), ["a", "1 tensors for 2 targets"]),
        ({"a": (2, 2)}, Convert(("a",), ("b",), (Unstack(0),)), ["a list of tensors", "target b"]),
        ({"a": (2, 2)}, Convert(("a",), ("b.{i}",)), ["one tensor", "b.{i}"]),
        ({"e.1": (2,), "e.01": (2,)}, Convert(("e.{i}",), ("e",), (Stack(),)), ["e.1", "e.01", "number 1"]),
        ({"a": (6,)}, Convert(("a",), ("b",), (Pad(0, 8, 5),)), ["a", "is not 5"]),
        ({"a": (6,)}, Convert(("a",), ("b",), (Reshape((2, 3), (2, 3)),)), ["a", "[6] is not [2, 3]"]),
        ({"a": (6,), "b": (1,)}, Convert(("a", "b"), ("c",), (Dequantize("fp8"),)), ["a, b", "FP8"]),
        ({"a": (6,)}, Convert(("a",), ("c",), (Dequantize("mxfp4"),)), ["a", "groups of 2"]),
        ({"a": (6,)}, Rename("(", "x"), ["no regular expression"]),
        ({"a": (6,)}, Rename("a", r"\3"), ["invalid group reference"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(shapes: Shapes, rule: Rule, words: list[str]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        apply_rules(table(shapes), [rule])
    assert [word for word in words if word not in str(caught.value)] == []


def test_parts_of_another_dtype_are_refused() -> None:
    tensors = table({"experts.0.w": (2, 2)}) | table({"experts.1.w": (2, 2)}, "F16")
    with pytest.raises(InvalidInputError, match=r"experts\.1\.w F16"):
        apply_rules(tensors, [Convert(("experts.{i}.w",), ("experts",), (Stack(0),))])


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ((), ("a",), "no source"),
        (("a.{i}", "b"), ("c.{i}",), "source 'b' lacks {i}"),
        (("a.{i}.{j}",), ("c",), r"\['i', 'j'\]"),
        (("a",), ("c.{i}.{j}",), r"\['i', 'j'\]"),
        (("a",), ("re:b",), "cannot be made from"),
    ],
)
def test_rules_that_make_no_sense_are_refused(sources: tuple[str, ...], targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Convert(sources, targets)


@pytest.mark.parametrize(
    "step",
    [
        Stack(1),
        Concatenate(1, (2, 3)),
        Split(0, (2, 3)),
        Transpose(1, 2),
        Permute((2, 0, 1)),
        Reshape((2, 3), (6,)),
        Interleave(1),
        Deinterleave(1),
        Rope(4),
        Pad(0, 8, 6),
        Unpad(0, 6, 8),
    ],
)
def test_the_inverse_of_an_inverse_is_the_step(step: Step) -> None:
    assert inverse(inverse(step)) == step


@pytest.mark.parametrize("step", [Chunk(0, uneven=True), Reshape((2, 3)), Pad(0, 8), Unpad(0, 8), Dequantize("fp8")])
def test_a_step_that_forgets_cannot_be_undone(step: Step) -> None:
    with pytest.raises(InvalidInputError, match="cannot be undone"):
        inverse(step)


@pytest.mark.parametrize("rule", [Rename("^a", "b"), Rename("a", ""), Rename("(a)", "b"), Rename("a", r"b\g<0>")])
def test_a_pattern_cannot_be_undone_unless_it_says_how(rule: Rename) -> None:
    with pytest.raises(InvalidInputError, match="give back="):
        reverse_rules([rule])
    assert reverse_rules([Rename(rule.pattern, rule.replacement, ("b", "a"))])[0] == Rename(
        "b", "a", (rule.pattern, rule.replacement), rule.pattern
    )
