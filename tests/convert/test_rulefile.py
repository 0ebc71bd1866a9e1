"""A file of rules holds the same rules as code, or is refused with the number of the rule that is wrong."""

from __future__ import annotations

import json

import pytest

from shardferry.conversions import (
    AddPrefix,
    Concatenate,
    Convert,
    Dequantize,
    Rename,
    Reshape,
    Split,
    Stack,
    StripPrefix,
)
from shardferry.convert.rulefile import parse_rules
from shardferry.errors import InvalidInputError

TOML = r"""
[[rules]]
strip_prefix = "module."
besides = ["lm_head."]

[[rules]]
add_prefix = "model."

[[rules]]
rename = '\.a\.'
to = ".b."
back = ['\.b\.', ".a."]

[[rules]]
convert = ["{h*}.{e}.w1", "{h*}.{e}.w3"]
to = ["{h*}.gate_up"]
steps = [{ step = "stack" }, { step = "concatenate", dim = 1, sizes = [4, 4] }]

[[rules]]
convert = ["{h*}.weight", "{h*}.scale"]
to = ["{h*}.weight"]
steps = [{ step = "dequantize", scheme = "fp8", block = [128, 128] }, { step = "reshape", shape = [2, -1] }]
partial = true

[[rules]]
convert = ["qkv"]
to = ["q", "k"]
steps = [{ step = "split", dim = 0, sizes = [4, 2] }]
back = { convert = ["q", "k"], to = ["qkv"], steps = [{ step = "concatenate" }] }
"""
RULES = (
    StripPrefix("module.", ("lm_head.",)),
    AddPrefix("model."),
    Rename(r"\.a\.", ".b.", (r"\.b\.", ".a.")),
    Convert(("{h*}.{e}.w1", "{h*}.{e}.w3"), ("{h*}.gate_up",), (Stack(), Concatenate(1, (4, 4)))),
    Convert(
        ("{h*}.weight", "{h*}.scale"), ("{h*}.weight",), (Dequantize("fp8", (128, 128)), Reshape((2, -1))), partial=True
    ),
    Convert(("qkv",), ("q", "k"), (Split(0, (4, 2)),), back=Convert(("q", "k"), ("qkv",), (Concatenate(),))),
)


def test_a_toml_file_holds_rules() -> None:
    assert parse_rules(TOML, is_json=False) == RULES


def test_a_json_file_holds_rules() -> None:
    text = json.dumps({"rules": [{"rename": "a", "to": "b"}]})
    assert parse_rules(text, is_json=True) == (Rename("a", "b"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", 'one list "rules"'),
        ('{"rules": {}}', 'one list "rules"'),
        ('{"rules": [1]}', "rule 1: .* is no table"),
        ('{"rules": [{"rename": "a", "to": "b"}, {}]}', "rule 2: it has none of the keys"),
        ('{"rules": [{"rename": "a"}]}', "Rename wants replacement"),
        ('{"rules": [{"rename": "a", "replacement": "b"}]}', 'is called "to"'),
        ('{"rules": [{"rename": "a", "to": 1}]}', "which is no str"),
        ('{"rules": [{"rename": "a", "to": "b", "back": ["c"]}]}', r"no tuple\[str, str\]"),
        ('{"rules": [{"strip_prefix": "a", "unless": "b"}]}', '"unless" is no key of StripPrefix'),
        ('{"rules": [{"convert": "a", "to": ["b"]}]}', '"sources" of Convert'),
        ('{"rules": [{"convert": ["a"], "to": ["b"], "steps": {}}]}', "is no list"),
        ('{"rules": [{"convert": ["a"], "to": ["b"], "steps": [{"step": "custom"}]}]}', "is no step"),
        ('{"rules": [{"convert": ["a"], "to": ["b"], "steps": [{"step": "stack", "dim": true}]}]}', "no int"),
        ('{"rules": [{"convert": ["a"], "to": ["b"], "steps": [{"step": "dequantize", "scheme": "x"}]}]}', "no Scheme"),
        ('{"rules": [{"convert": ["a"], "to": [], "steps": []}]}', "no source or no target"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_rules(text, is_json=True)


def test_what_is_no_toml_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no TOML"):
        parse_rules("[[rules", is_json=False)
