"""What a request and a byte cost, from timed reads of a storage whose costs are known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.plan.fit import Fit, Point, fit_points

if TYPE_CHECKING:
    from collections.abc import Sequence

SPANS = (4 << 10, 128 << 10, 1 << 20, 4 << 20)
FRACTION = 1 / 8

kinds = st.sampled_from(("additive", "partly overlapped", "overlapped"))
bandwidths = st.floats(1e7, 1e10)
# Well between the smallest span and the largest, so that the points show both costs.
seeks = st.floats(64 << 10, 1 << 20)


def seconds(kind: str, span: float, request: float, byte: float) -> float:
    if kind == "partly overlapped":
        return math.hypot(request, byte * span)
    return request + byte * span if kind == "additive" else max(request, byte * span)


def points(values: Sequence[float]) -> list[Point]:
    return [Point(span, 8 * span, 4, value) for span, value in zip(SPANS, values, strict=True)]


def break_even(kind: str, request: float, byte: float) -> float:
    """The span at which a part of a file in spans takes as long as all of it, by bisection."""
    low, high = 1.0, 1e10
    for _ in range(200):
        middle = (low * high) ** 0.5
        slower = FRACTION * seconds(kind, middle, request, byte) / middle > byte
        low, high = (middle, high) if slower else (low, middle)
    return low


@given(kinds, bandwidths, seeks)
def test_exact_times_give_back_the_costs(kind: str, bandwidth: float, seek: float) -> None:
    byte = 1 / bandwidth
    fit = fit_points(points([seconds(kind, span, seek * byte, byte) for span in SPANS]))
    assert fit is not None
    assert fit.max_error < 1e-6
    assert fit.kind == kind
    assert fit.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert fit.seek_bytes == pytest.approx(seek, abs=1)
    assert fit.break_even_bytes(FRACTION) == pytest.approx(break_even(kind, seek * byte, byte), rel=1e-6)


@given(kinds, bandwidths, seeks, st.tuples(*[st.floats(-0.2, 0.2)] * len(SPANS)))
def test_the_break_even_span_stays_within_twice_where_times_are_off_by_a_fifth(
    kind: str, bandwidth: float, seek: float, noise: tuple[float, ...]
) -> None:
    byte = 1 / bandwidth
    exact = [seconds(kind, span, seek * byte, byte) for span in SPANS]
    fit = fit_points(points([value * (1 + off) for value, off in zip(exact, noise, strict=True)]))
    assert fit is not None
    assert fit.holds
    assert 0.5 < fit.break_even_bytes(FRACTION) / break_even(kind, seek * byte, byte) < 2


def test_the_error_is_that_of_the_worst_point() -> None:
    # One stall: 1 MiB takes four times as long as the others say.
    fit = fit_points(points([1.0, 1.0, 4.0, 1.0]))
    assert fit is None or not fit.holds
    fit = fit_points([Point(1, 1, 1, 1.0), Point(2, 2, 1, 2.0), Point(4, 4, 1, 5.0)])
    assert fit is not None
    worst = max(
        max(fit.seconds(span) / told, told / fit.seconds(span)) - 1 for span, told in ((1, 1.0), (2, 2.0), (4, 5.0))
    )
    assert fit.max_error == pytest.approx(worst)
    assert 0.05 < worst < 0.25


def test_without_three_sizes_nothing_is_told() -> None:
    assert fit_points([Point(SPANS[0], SPANS[0], 4, 0.1)] * 4) is None
    assert fit_points([]) is None


def test_requests_that_cost_nothing_are_told() -> None:
    fit = fit_points(points([span * 1e-9 for span in SPANS]))
    assert fit is not None
    assert fit.seek_bytes <= 1
    assert fit.holds


def test_what_is_off_too_far_does_not_hold() -> None:
    assert Fit("additive", 1.0, 1.0, 1, max_error=0.5).holds
    assert not Fit("additive", 1.0, 1.0, 1, max_error=0.51).holds
