"""hypothesis strategies for shapes, regions and mesh layouts, small enough to check element by element."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from shardferry.geometry.region import Intervals, Region
from shardferry.geometry.sharding import MeshLayout, Split

MAX_DIM = 9
MAX_AXIS = 4


def shapes(min_dims: int = 0, max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Return a strategy for tensor shapes, zero-size dims included."""
    return st.lists(st.integers(0, MAX_DIM), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def intervals(draw: st.DrawFn, size: int) -> Intervals:
    """Draw an ascending list of disjoint, non-touching intervals within `size` elements."""
    held = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    bounds = [i for i in range(size + 1) if (i < size and held[i]) != (i > 0 and held[i - 1])]
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Draw a region of a tensor of `shape`."""
    return Region(tuple(draw(intervals(size)) for size in shape))


@st.composite
def mesh_layouts(draw: st.DrawFn, num_dims: int) -> MeshLayout:
    """Draw a layout of a tensor of `num_dims` dims over a mesh of up to three axes, in any rank order."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, MAX_AXIS), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(math.prod(mesh_shape))))
    axes = draw(st.permutations(range(len(mesh_shape))))
    splits = tuple(
        Split(axis, draw(st.integers(0, num_dims - 1)), draw(st.integers(1, 3)))
        for axis in axes
        if num_dims and draw(st.booleans())
    )
    return MeshLayout(mesh_shape, tuple(ranks), splits)
