"""What all ranks have told that they want, as the arrays of a job that prices are computed from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardferry.geometry.spans import BITS_PER_BYTE
from shardferry.plan.demand import all_shapes, patterns_of
from shardferry.plan.patterns import JobShape, Parts, Pattern, measure_parts

if TYPE_CHECKING:
    from shardferry.format.index import CheckpointIndex
    from shardferry.geometry.region import Region
    from shardferry.plan.demand import Demand, Units


def shape_demand(demand: Demand, units: Units, index: CheckpointIndex, *, world_size: int, seek_bytes: int) -> JobShape:
    """Return a job as arrays; the same on every rank.

    A rank's part of a stored tensor is all that it wants of it. What is looked at in two shapes counts as two tensors.

    Args:
        demand: What all ranks want.
        units: Everything stored.
        index: The checkpoint.
        world_size: Ranks of the job.
        seek_bytes: What one more request costs, in bytes; see `CostModel`.
    """
    files, starts = units.files, units.starts
    patterns: list[Pattern] = []
    members = [np.zeros(0, np.int64)]
    known: dict[tuple[object, ...], Parts] = {}
    for told in patterns_of(demand, units, all_shapes(demand)):
        distinct: dict[tuple[Region, ...], int] = {}
        part_of_rank = np.full(world_size, -1, np.int64)
        for rank, regions in told.wants:
            part_of_rank[rank] = distinct.setdefault(regions, len(distinct))
        key = (told.shape, told.bits, *distinct)  # groups of other ranks cut alike
        if key not in known:
            known[key] = measure_parts(list(distinct), told.shape, told.bits, seek_bytes)
        num_bytes = math.prod(told.shape) * told.bits // BITS_PER_BYTE
        patterns.append(Pattern(len(told.units), num_bytes, np.unique(files[told.units]), part_of_rank, known[key]))
        members.append(told.units)
    which = np.repeat(np.arange(len(patterns)), [len(some) for some in members[1:]])
    wanted = np.concatenate(members)
    order = np.lexsort((which, wanted))  # units are in the order of the files
    which, wanted = which[order], wanted[order]
    sizes = np.array([pattern.num_bytes for pattern in patterns], np.int64)
    spans = np.stack([starts[wanted], starts[wanted] + sizes[which]], axis=1)
    data = np.array([info.size - info.header_bytes for info in index.files.values()], np.int64)
    return JobShape(tuple(patterns), which, files[wanted], spans, data, world_size)
