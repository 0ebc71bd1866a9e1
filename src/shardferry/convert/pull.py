"""Pull a region of a converted tensor back to the regions of stored tensors it is made of.

On the way down the tree every dim is a row of digits, like hours, minutes and seconds: a digit has a size and the
values of it that are held. Reshaping only regroups digits, and splits one where a dim ends inside it; transposing
reorders dims; a tile or a picked region cuts the leading digit. Every digit remembers the dim of the target it fills
and the step between its values there, so that all the way down only one number per target dim changes: where the
piece starts. Where cutting does not fall on whole digits, all but the last are taken apart value by value: always
right, and only there many pieces.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from shardferry.convert.ops import Computed, Expression, Picked, Reshaped, Stored, Tiled, Transposed, Zeros
from shardferry.geometry.region import Interval, Intervals, Region, overlap, select, shift

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

NOWHERE = -1
# What is worked out once for all layers and experts that are alike.
CACHED = 4096


class Piece(NamedTuple):
    """One copy: a region of a stored tensor, and where it goes in the local tensor of the target region.

    The region's array is reordered by `axes`. Without `fine`, its dims are then those of the local tensor, and it
    fills the box `target`. With `fine`, index i of dim k counts `step` positions of dim `dim` for `(dim, step) =
    fine[k]`, added up over the dims k that name the same `dim`; `target` is the range of i in each.

    Attributes:
        source: The stored tensor, or box of one; its shape is the one the region is meant in.
        region: Region of it.
        axes: Order of its dims: dim k of the reordered array is dim `axes[k]` of the region.
        target: Per dim of the reordered array a half-open range of positions.
        fine: Empty if these are the local tensor's own dims; else a dim of it, or -1, and a step for each.
        counts: The shape in which a computed region's array is looked at, before it is reordered.
    """

    source: Stored | Zeros | Computed
    region: Region
    axes: tuple[int, ...]
    target: tuple[Interval, ...]
    fine: tuple[tuple[int, int], ...] = ()
    counts: tuple[int, ...] = ()


class Digit(NamedTuple):
    """A factor of a dim.

    Attributes:
        size: How many values it can have.
        held: The values that are wanted.
        dim: The dim of the target it fills; `NOWHERE` if it has one value only.
        step: How far apart two held values lie in that dim.
    """

    size: int
    held: Intervals
    dim: int
    step: int

    @property
    def width(self) -> int:
        """How many values are held."""
        return sum(stop - start for start, stop in self.held)


Dim = tuple[Digit, ...]
_Moves = tuple[tuple[int, int], ...]
_Options = tuple[tuple[Dim, _Moves], ...]
_ONE = Digit(1, ((0, 1),), NOWHERE, 0)


class Frame(NamedTuple):
    """What is wanted of an expression.

    Attributes:
        dims: Its dims, each a row of digits, the most significant first; none for a dim of size 1.
        starts: Per dim of the target where the first element goes.
    """

    dims: tuple[Dim, ...]
    starts: tuple[int, ...]


def frames_of(expression: Expression, region: Region) -> Iterator[tuple[Stored | Zeros | Computed, Frame]]:
    """Yield the leaves a region is made of, and what is wanted of each, digit by digit."""
    if not all(region.dims):
        return
    dims = tuple(
        (Digit(size, held, dim, 1),) for dim, (size, held) in enumerate(zip(expression.shape, region.dims, strict=True))
    )
    yield from _pull(expression, Frame(dims, (0,) * len(dims)))


def pull_back(expression: Expression, region: Region) -> Iterator[Piece]:
    """Yield the copies that fill the local tensor of `region` of the expression's tensor.

    Together the pieces fill every local element once, if tiles cover their whole; empty pieces are left out.

    Args:
        expression: How the target is made.
        region: Region of the target, within its shape.
    """
    if isinstance(expression, Stored):  # what most tensors of most models are: nothing to work out
        if all(region.dims):
            sizes = region.shape
            yield Piece(expression, region, tuple(range(len(sizes))), tuple([(0, size) for size in sizes]))
        return
    for leaf, frame in frames_of(expression, region):
        yield _piece_of_values(leaf, frame) if isinstance(leaf, Computed) else _piece(leaf, frame)


def _pull(expression: Expression, frame: Frame) -> Iterator[tuple[Stored | Zeros | Computed, Frame]]:
    if isinstance(expression, Stored | Zeros | Computed):
        yield expression, frame
    elif isinstance(expression, Transposed):
        inverse = (expression.axes.index(axis) for axis in range(len(expression.axes)))
        yield from _pull(expression.of, frame._replace(dims=tuple(frame.dims[dim] for dim in inverse)))
    elif isinstance(expression, Reshaped):
        for dims, moves in _regroup([digit for dim in frame.dims for digit in dim], list(expression.of.shape)):
            yield from _pull(expression.of, Frame(dims, _moved(frame.starts, moves)))
    elif isinstance(expression, Picked):
        options = [
            _pick(dim, held, size)
            for dim, held, size in zip(frame.dims, expression.region.dims, expression.of.shape, strict=True)
        ]
        for below in _combine(options, frame.starts):
            yield from _pull(expression.of, below)
    else:
        yield from _pull_tiles(expression, frame)


def _pull_tiles(expression: Tiled, frame: Frame) -> Iterator[tuple[Stored | Zeros | Computed, Frame]]:
    for offsets, part in expression.tiles:
        options: list[_Options] = []
        for dim, start, size, full in zip(frame.dims, offsets, part.shape, expression.shape, strict=True):
            options.append(((dim, ()),) if size == full else _cut(dim, start, start + size))
            if not options[-1]:
                break
        else:
            for below in _combine(options, frame.starts):
                yield from _pull(part, below)


def _combine(options: Sequence[Sequence[tuple[Dim, _Moves]]], starts: tuple[int, ...]) -> Iterator[Frame]:
    for chosen in product(*options):
        moves = [move for _, moves in chosen for move in moves]
        yield Frame(tuple([dim for dim, _ in chosen]), _moved(starts, moves))


def _moved(starts: tuple[int, ...], moves: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    moved = list(starts)
    for dim, by in moves:
        moved[dim] += by
    return tuple(moved)


def _cut(dim: Dim, start: int, stop: int) -> _Options:
    """Return what is wanted of indices [start, stop) of a dim, counted from `start`."""
    if start == stop:
        return ()
    unit = _size(dim[1:])
    if dim and (len(dim) == 1 or not (start % unit or stop % unit)):
        return _cut_leading(dim, start // unit, stop // unit)
    simple = _simple(dim)
    return tuple(option for digit, moves in simple for option in _add(moves, _cut((digit,), start, stop)))


@lru_cache(maxsize=CACHED)
def _cut_leading(dim: Dim, start: int, stop: int) -> _Options:
    """Return what is wanted of the values [start, stop) of the leading digit, counted from `start`."""
    digit, *rest = dim
    inside, (first, last) = overlap(digit.held, start, stop)
    if first == last:
        return ()
    cut = digit._replace(size=stop - start, held=shift(inside, -start))
    return (((cut, *rest), _move(digit, first)),)


def _pick(dim: Dim, region: Intervals, size: int) -> _Options:
    """Return what is wanted of a dim of `size`, given what is wanted of a region of it."""
    if region == ((0, size),):
        return ((dim, ()),)
    unit = _size(dim[1:])
    start = region[0][0]
    if not dim or (len(dim) > 1 and (len(region) > 1 or start % unit or size % unit)):
        simple = _simple(dim)
        return tuple(option for digit, moves in simple for option in _add(moves, _pick((digit,), region, size)))
    digit, *rest = dim
    if len(region) == 1:
        held = shift(digit.held, start // unit)
    else:
        held = tuple(interval for a, b in digit.held for interval in select(region, a, b))
    return (((digit._replace(size=size // unit, held=held), *rest), ()),)


def _regroup(digits: Sequence[Digit], shape: Sequence[int]) -> Iterator[tuple[tuple[Dim, ...], _Moves]]:
    """Yield the digits as the dims of a tensor of another shape, from the last dim to the first."""
    if not shape:
        yield (), ()
        return
    rest = [digit for digit in digits if digit.size > 1]
    taken: Dim = ()
    need = shape[-1]
    while need > 1:
        digit = rest.pop()
        if need % digit.size == 0:
            taken, need = (digit, *taken), need // digit.size
        elif digit.size % need == 0:
            for high, low, moves in _split(digit, need):
                for dims, more in _regroup([*rest, high], shape[:-1]):
                    yield (*dims, (low, *taken)), moves + more
            return
        else:
            for simple, moves in _simple(tuple(digits)):
                for dims, more in _regroup([simple], shape):
                    yield dims, moves + more
            return
    for dims, moves in _regroup(rest, shape[:-1]):
        yield (*dims, taken), moves


def _split(digit: Digit, size: int) -> Iterator[tuple[Digit, Digit, _Moves]]:
    """Yield a digit as two, the lower one of `size`: a box of values at a time."""
    done = 0
    for rows, held in _rows(digit.held, size):
        width = sum(stop - start for start, stop in held)
        high = Digit(digit.size // size, rows, digit.dim, digit.step * width)
        yield high, Digit(size, held, digit.dim, digit.step), _move(digit, done)
        done += high.width * width


def _rows(held: Intervals, size: int) -> list[tuple[Intervals, Intervals]]:
    """Return what is held of rows of `size`, as runs of rows of which the same is held."""
    single: list[tuple[Interval, Intervals]] = []
    for start, stop in held:
        for first, last, inside in _rows_of(start, stop, size):
            if single and single[-1][0] == (first, last) and last - first == 1:
                inside = (*single.pop()[1], *inside)  # noqa: PLW2901 - the row goes on
            single.append(((first, last), inside))
    runs: list[tuple[Intervals, Intervals]] = []
    for rows, inside in single:
        if runs and runs[-1][1] == inside:
            before = runs.pop()[0]
            touching = before[-1][1] == rows[0]
            joined = (*before[:-1], (before[-1][0], rows[1])) if touching else (*before, rows)
            runs.append((joined, inside))
        else:
            runs.append(((rows,), inside))
    return runs


def _rows_of(start: int, stop: int, size: int) -> Iterator[tuple[int, int, Intervals]]:
    """Yield an interval as the rest of a row, whole rows, and the beginning of a row."""
    row = start // size
    if start % size or stop < (row + 1) * size:
        end = min(stop, (row + 1) * size)
        yield row, row + 1, ((start - row * size, end - row * size),)
        start, row = end, row + 1
    last = stop // size
    if row < last:
        yield row, last, ((0, size),)
        start = last * size
    if start < stop:
        yield last, last + 1, ((0, stop - last * size),)


def _simple(dim: Dim) -> Iterator[tuple[Digit, _Moves]]:
    """Yield a dim as single digits: one for every combination of values of all digits but the last."""
    *leading, last = dim or (_ONE,)
    size, unit = _size(dim), last.size
    values = [[value for start, stop in digit.held for value in range(start, stop)] for digit in leading]
    units = [_size((*leading[at + 1 :], last)) for at in range(len(leading))]
    for chosen in product(*(enumerate(held) for held in values)):
        base = sum(value * width for (_, value), width in zip(chosen, units, strict=True))
        moves = tuple(move for (at, _), digit in zip(chosen, leading, strict=True) for move in _move(digit, at))
        assert base % unit == 0
        yield last._replace(size=size, held=shift(last.held, base)), moves


def _move(digit: Digit, by: int) -> _Moves:
    return ((digit.dim, by * digit.step),) if by and digit.dim != NOWHERE else ()


def _add(moves: _Moves, options: Iterable[tuple[Dim, _Moves]]) -> Iterator[tuple[Dim, _Moves]]:
    for dim, more in options:
        yield dim, moves + more


def _size(dim: Sequence[Digit]) -> int:
    size = 1
    for digit in dim:
        size *= digit.size
    return size


def _piece(leaf: Stored | Zeros, frame: Frame) -> Piece:
    shape, region, axes, target, fine = _copied(frame)
    if leaf.shape != shape:
        leaf = Stored(leaf.key, shape, leaf.part) if isinstance(leaf, Stored) else Zeros(shape)
    return Piece(leaf, region, axes, target, fine)


@lru_cache(maxsize=CACHED)
def _copied(frame: Frame) -> tuple[tuple[int, ...], Region, *_Target]:
    """Return the shape in which a leaf is looked at, and the other attributes of its piece."""
    digits, axes, target, fine = _place(_joined([digit for dim in frame.dims for digit in dim]), frame.starts)
    return tuple(digit.size for digit in digits), Region(tuple(digit.held for digit in digits)), axes, target, fine


def _piece_of_values(leaf: Computed, frame: Frame) -> Piece:
    """Return a piece whose region is one of the computed tensor itself: it is no file that has any shape."""
    region = Region(tuple(_merged(dim) for dim in frame.dims))
    digits, axes, target, fine = _place([digit for dim in frame.dims for digit in dim], frame.starts)
    return Piece(leaf, region, axes, target, fine, tuple(digit.width for digit in digits))


def _merged(dim: Dim) -> Intervals:
    """Return the indices of a dim that its digits hold."""
    held: Intervals = ((0, 1),)
    for digit in dim:
        if digit.held == ((0, digit.size),):
            held = tuple((start * digit.size, stop * digit.size) for start, stop in held)
            continue
        found: list[Interval] = []
        for value in (value for start, stop in held for value in range(start, stop)):
            for start, stop in shift(digit.held, value * digit.size):
                if found and found[-1][1] == start:
                    found[-1] = (found[-1][0], stop)
                else:
                    found.append((start, stop))
        held = tuple(found)
    return held


def _joined(digits: Sequence[Digit]) -> list[Digit]:
    """Return digits with neighbours made one wherever their values lie and land next to each other."""
    joined: list[Digit] = []
    for digit in digits:
        before = joined[-1] if joined else None
        if before is not None and (both := _join(before, digit)) is not None:
            joined[-1] = both
        else:
            joined.append(digit)
    return joined


def _join(high: Digit, low: Digit) -> Digit | None:
    dim = low.dim if high.dim == NOWHERE else high.dim
    if low.dim not in {dim, NOWHERE}:
        return None
    if high.width == 1:
        (start, _) = high.held[0]
        return Digit(high.size * low.size, shift(low.held, start * low.size), dim, low.step if low.width > 1 else 1)
    if low.held == ((0, low.size),) and (low.size == 1 or high.step == low.step * low.size):
        held = tuple((start * low.size, stop * low.size) for start, stop in high.held)
        return Digit(high.size * low.size, held, dim, high.step if low.size == 1 else low.step)
    return None


_Target = tuple[tuple[int, ...], tuple[Interval, ...], tuple[tuple[int, int], ...]]


def _place(digits: Sequence[Digit], starts: tuple[int, ...]) -> tuple[list[Digit], *_Target]:
    """Return the digits, perhaps with some of size 1 in front, and how they become the target's dims."""
    missing = [dim for dim in range(len(starts)) if all(digit.dim != dim for digit in digits)]
    digits = [*(Digit(1, ((0, 1),), dim, 1) for dim in missing), *digits]
    order = sorted(range(len(digits)), key=lambda at: (digits[at].dim, -digits[at].step))
    if [digits[at].dim for at in order] == list(range(len(starts))) and all(
        digit.step == 1 or digit.width == 1 for digit in digits
    ):
        target = tuple((starts[digits[at].dim], starts[digits[at].dim] + digits[at].width) for at in order)
        return digits, tuple(order), target, ()
    # What a piece starts at is counted by the finest digit of each dim, or by one more if that leaves a remainder.
    rest = list(starts)
    firsts = [0] * len(digits)
    for at in order:
        digit = digits[at]
        finest = all(other.dim != digit.dim or other.step >= digit.step for other in digits)
        if digit.dim != NOWHERE and finest and rest[digit.dim] % digit.step == 0:
            firsts[at], rest[digit.dim] = rest[digit.dim] // digit.step, 0
    extra = [dim for dim, start in enumerate(rest) if start]
    fine = [(digits[at].dim, digits[at].step if digits[at].dim != NOWHERE else 0) for at in order]
    target = tuple((firsts[at], firsts[at] + digits[at].width) for at in order)
    return (
        [*(_ONE for _ in extra), *digits],
        (*range(len(extra)), *(at + len(extra) for at in order)),
        (*((rest[dim], rest[dim] + 1) for dim in extra), *target),
        (*((dim, 1) for dim in extra), *fine),
    )
