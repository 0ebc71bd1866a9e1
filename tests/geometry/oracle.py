"""What geometry means, element by element with NumPy: slow, and plain enough to be believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardferry.geometry.region import Region
    from shardferry.geometry.sharding import MeshLayout


def gather(array: NDArray[np.int64], region: Region) -> NDArray[np.int64]:
    """Return the local tensor of a region."""
    for dim, intervals in enumerate(region.dims):
        held = [i for start, stop in intervals for i in range(start, stop)]
        array = np.take(array, np.array(held, np.int64), axis=dim)
    return array


def numbered(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return a tensor whose elements are their own flat index."""
    return np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64).reshape(shape)


def cut_by_torch_rule(array: NDArray[np.int64], layout: MeshLayout, position: int) -> NDArray[np.int64]:
    """Return what a mesh position holds, by cutting the array the way `torch.chunk` cuts, split after split."""
    coordinates = np.unravel_index(position, layout.mesh_shape)
    for split in layout.splits:
        pieces = []
        for group in chunks(array, split.groups, split.dim):
            parts = chunks(group, layout.mesh_shape[split.axis], split.dim)
            pieces.append(parts[int(coordinates[split.axis])])
        array = np.concatenate(pieces, axis=split.dim)
    return array


def chunks(array: NDArray[np.int64], count: int, dim: int) -> list[NDArray[np.int64]]:
    """Return `count` pieces of ceil(size / count) elements; the last ones may be short or empty."""
    width = -(-array.shape[dim] // count)
    return [np.take(array, range(i * width, min((i + 1) * width, array.shape[dim])), axis=dim) for i in range(count)]
