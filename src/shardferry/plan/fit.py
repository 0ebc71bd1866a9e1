"""From a few timed reads to what a request and a byte cost. Pure: the reads were made elsewhere.

Three ways in which requests and bytes can add up are tried, because real storage does each, and the best one is kept:

* additive: a request takes `a + b * span`. A disk.
* partly overlapped: it takes `sqrt(a**2 + (b * span)**2)`. A few streams, or read-ahead: measured on a FUSE mount and a
  web server, whose break-even spans the other two missed by 10 to 60 %, and this one by 3 %.
* overlapped: it takes `max(a, b * span)`. Many streams: some wait while others fill the line.

`a` and `b` are seconds of the whole node with all its streams running, so `a` is the latency divided by the streams,
and `a / b` the bytes that could have been read instead of one more request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["additive", "partly overlapped", "overlapped"]
# All three are one norm of `a` and `b * span`.
_POWERS: dict[Kind, float] = {"additive": 1, "partly overlapped": 2, "overlapped": math.inf}
# A fit that is off by more at any point says nothing about the points between: a guess, half of what a plan tolerates.
MAX_ERROR = 0.5
# Fewer sizes than this fit any model.
MIN_POINTS = 3


class Point(NamedTuple):
    """Reads of one size, timed.

    Attributes:
        span_bytes: Bytes of each read.
        stride_bytes: From the start of one read to that of the next in the file; `span_bytes` where they touch.
        streams: Reads in flight.
        seconds: Wall time divided by the number of reads.
    """

    span_bytes: int
    stride_bytes: int
    streams: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What a request and a byte cost at some number of streams, and how far the points are from that.

    Attributes:
        kind: How the two add up.
        request_seconds: `a`: of one request, all streams running.
        byte_seconds: `b`: of one byte, all streams running.
        streams: Reads in flight.
        max_error: How far the fit is off at the worst point: 0.1 for 10 % above or below it.
    """

    kind: Kind
    request_seconds: float
    byte_seconds: float
    streams: int
    max_error: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second of long reads."""
        return 1 / self.byte_seconds

    @property
    def seek_bytes(self) -> int:
        """Bytes that could have been read instead of one more request."""
        return round(self.request_seconds / self.byte_seconds)

    @property
    def holds(self) -> bool:
        """Whether the points lie close enough to it."""
        return self.max_error <= MAX_ERROR

    def seconds(self, span_bytes: float) -> float:
        """Return what a read of this size should take, per read, all streams running."""
        return _norm(self.request_seconds, self.byte_seconds * span_bytes, _POWERS[self.kind])

    def break_even_bytes(self, fraction: float) -> float:
        """Return the span above which reading only `fraction` of a file in spans beats reading all of it.

        Args:
            fraction: Part of the bytes that is wanted, between 0 and 1, evenly spread.

        Examples:
            >>> Fit("additive", 0.001, 1e-9, 4, 0.0).break_even_bytes(0.5)
            1000000.0
        """
        power = _POWERS[self.kind]
        seek = self.request_seconds / self.byte_seconds
        return fraction * seek / math.pow(1 - math.pow(fraction, power), 1 / power)


def fit_points(points: Sequence[Point]) -> Fit | None:
    """Return the model that is least off at its worst point; None if no bandwidth can be told from the points.

    Args:
        points: With one number of streams; at least `MIN_POINTS` of different spans, else the answer is None.

    Examples:
        >>> fit = fit_points([Point(size, size, 4, 0.001 + size * 1e-9) for size in (1 << 14, 1 << 20, 1 << 22)])
        >>> fit.kind, fit.seek_bytes, round(fit.max_error, 6)
        ('additive', 1000000, 0.0)
    """
    ascending = sorted((point.span_bytes, point.seconds) for point in points)
    if len({span for span, _ in ascending}) < MIN_POINTS:
        return None
    kinds: tuple[Kind, ...] = ("additive", "partly overlapped")
    guesses = [(kind, _least_squares(ascending, _POWERS[kind])) for kind in kinds]
    guesses += [("overlapped", _split(ascending, at)) for at in range(1, len(ascending))]
    found = [
        Fit(kind, request, byte, points[0].streams, _worst(request, byte, _POWERS[kind], ascending))
        for kind, (request, byte) in guesses
        if byte > 0
    ]
    return min(found, key=lambda fit: fit.max_error, default=None)


def _norm(request: float, bytes_: float, power: float) -> float:
    return max(request, bytes_) if math.isinf(power) else (request**power + bytes_**power) ** (1 / power)


def _least_squares(points: Sequence[tuple[int, float]], power: float) -> tuple[float, float]:
    """Return `a >= 0` and `b >= 0` with the least sum of squared relative errors of `a**power + (b * span)**power`."""
    ones = [seconds**-power for _, seconds in points]
    spans = [(span / seconds) ** power for span, seconds in points]
    aa, ab, bb = _product(ones, ones), _product(ones, spans), _product(spans, spans)
    at, bt = sum(ones), sum(spans)
    determinant = aa * bb - ab * ab
    request, byte = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
    if request < 0:
        request, byte = 0.0, bt / bb
    return request ** (1 / power), max(0.0, byte) ** (1 / power)


def _product(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))


def _split(points: Sequence[tuple[int, float]], at: int) -> tuple[float, float]:
    """Return `a` and `b` if the first `at` points show nothing but requests, and the others nothing but bytes."""
    seconds = [seconds for _, seconds in points[:at]]
    bytes_ = [seconds / span for span, seconds in points[at:]]
    return _middle(seconds), _middle(bytes_)


def _middle(values: Sequence[float]) -> float:
    """Return what is off from the largest by the same factor as from the smallest."""
    return math.sqrt(min(values) * max(values))


def _worst(request: float, byte: float, power: float, points: Sequence[tuple[int, float]]) -> float:
    def error(span: int, seconds: float) -> float:
        factor = _norm(request, byte * span, power) / seconds
        return max(factor, 1 / factor) - 1

    return max(starmap(error, points))
