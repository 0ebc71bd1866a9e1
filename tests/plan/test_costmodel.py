"""Cost models as files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardferry.errors import InvalidInputError
from shardferry.plan.costmodel import PRESETS, CostModel, cost_model_from_json, cost_model_to_json


def read(values: object) -> CostModel:
    return cost_model_from_json(json.dumps(values).encode(), "costs.json")


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_comes_back_as_it_was_written(name: str) -> None:
    values = cost_model_to_json(PRESETS[name])
    assert read(values) == PRESETS[name]
    assert read({"path": "/ckpt", "cost_model": values}) == PRESETS[name]
    assert "Infinity" not in json.dumps(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seek_bytes", -1),
        ("seek_bytes", 1.5),
        ("seek_bytes", True),
        ("seek_bytes", 1 << 50),
        ("node_bandwidth", 0),
        ("node_bandwidth", None),
        ("node_bandwidth", "fast"),
        ("interconnect_bandwidth", 1e16),
        ("stream_bandwidth", False),
        ("shared_bandwidth", -1),
        ("streams", 0),
        ("has_page_cache", 1),
        ("source", 3),
        ("source", "x" * 501),
        ("source", "a\x1b[31m"),
    ],
)
def test_an_impossible_value_is_named_with_what_it_should_be(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=rf"^costs\.json: {name} must be "):
        read(cost_model_to_json(PRESETS["local"]) | {name: value})


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"^costs\.json .*probe --json"):
        cost_model_from_json(raw, "costs.json")


def test_missing_unknown_and_repeated_names_are_named() -> None:
    values = cost_model_to_json(PRESETS["local"])
    with pytest.raises(InvalidInputError, match="lacks streams"):
        read({name: value for name, value in values.items() if name != "streams"})
    with pytest.raises(InvalidInputError, match="has 'seek_cost', which no cost model has"):
        read(values | {"seek_cost": 1})
    with pytest.raises(InvalidInputError, match="gives 'streams' twice"):
        cost_model_from_json(json.dumps(values).replace("{", '{"streams": 1, ', 1).encode(), "costs.json")
    with pytest.raises(InvalidInputError, match="cost_model must be an object, not an array"):
        read({"cost_model": []})


def test_an_infinite_bandwidth_is_null() -> None:
    written = cost_model_to_json(replace(PRESETS["local"], shared_bandwidth=float("inf")))
    assert written["shared_bandwidth"] is None
