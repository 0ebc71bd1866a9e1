"""Bytes and requests of each way of reading, as sums over the patterns of a job.

Where nodes have a page cache, what several ranks of one fetch crosses the storage link once. Where they have none,
every rank fetches for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.plan.patterns import Atoms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from shardferry.plan.patterns import Ints, JobShape, Pattern

    Floats = NDArray[np.float64]


class Volume(NamedTuple):
    """What a way of reading moves.

    Attributes:
        node_bytes: Shape (num_nodes,): bytes that cross the storage link to each node.
        node_requests: Shape (num_nodes,): runs of bytes read from storage; a long run is one however it is cut.
        rank_bytes: Shape (world_size,): bytes each rank reads, out of a page cache included.
        received_remote: Shape (num_nodes,): bytes that ranks of a node receive from other nodes.
        received_local: Shape (world_size,): bytes a rank receives from other ranks of its node.
        received: Shape (world_size,): bytes a rank receives from any other.
    """

    node_bytes: Ints
    node_requests: Ints
    rank_bytes: Ints
    received_remote: Ints
    received_local: Ints
    received: Ints


class Bridge(NamedTuple):
    """Holes between neighbours in a file that ranks read along.

    Attributes:
        num: How many there are of this kind.
        ranks: Ranks that do it.
        holes: Shape (num_ranks,): bytes of the hole for each.
        before: Shape (num_ranks,): bytes of it in the first tensor.
        after: Shape (num_ranks,): bytes of it in the second.
        kinds: Shape (num_ranks,): equal where ranks hold the same parts of both.
        part_of_rank: Shape (world_size,): the part each rank holds of the first tensor.
    """

    num: int
    ranks: Ints
    holes: Ints
    before: Ints
    after: Ints
    kinds: Ints
    part_of_rank: Ints


def wanted_by_rank(shape: JobShape) -> Ints:
    """Return the bytes each rank wants, of shape (world_size,)."""
    wanted = np.zeros(shape.world_size, np.int64)
    for pattern in shape.patterns:
        wanted += pattern.num_tensors * _by_rank(pattern.parts.wanted, pattern.part_of_rank)
    return wanted


def wanted_by_group(shape: JobShape, group_of: Ints) -> Ints:
    """Return the bytes that any rank of each group wants, each counted once, of shape (num_groups,)."""
    num_groups = _count(group_of)
    wanted = np.zeros(num_groups, np.int64)
    for pattern in shape.patterns:
        wanted += pattern.num_tensors * _union(pattern.parts.atoms, pattern.part_of_rank, group_of, num_groups)
    return wanted


def find_bridges(shape: JobShape, seek_bytes: int) -> Iterator[Bridge]:
    """Yield the holes of fewer than `seek_bytes` between one tensor and the next one of ranks.

    Ranks that hold parts of the same tensors have the same neighbours, so they are looked at together.
    """
    patterns = shape.patterns
    sizes = np.array([pattern.num_bytes for pattern in patterns], np.int64)
    whole = np.flatnonzero(shape.spans[:, 1] - shape.spans[:, 0] == sizes[shape.pattern_of])  # not boxes of a tensor
    held = np.array([pattern.part_of_rank >= 0 for pattern in patterns], np.bool_).reshape(-1, shape.world_size)
    _, first, group_of = np.unique(np.packbits(held, axis=0), axis=1, return_index=True, return_inverse=True)
    for group, rank in enumerate(first):
        ranks = np.flatnonzero(group_of.reshape(-1) == group)
        mine = whole[held[:, rank][shape.pattern_of[whole]]]
        a, b = mine[:-1], mine[1:]
        gaps = shape.spans[b, 0] - shape.spans[a, 1]
        near = (shape.file_of[a] == shape.file_of[b]) & (gaps >= 0) & (gaps < seek_bytes)
        keys = np.stack([shape.pattern_of[a], shape.pattern_of[b], gaps])[:, near]
        for (left, right, gap), count in zip(*_distinct(keys), strict=True):
            yield from _bridge(patterns[left], patterns[right], int(gap), ranks, seek_bytes, int(count))


def volume_independent(shape: JobShape, node_of: Ints, bridges: Iterable[Bridge], *, has_page_cache: bool) -> Volume:
    """Return what it takes when every rank reads its own bytes, and holes that are cheaper than a seek.

    Args:
        shape: The job.
        node_of: Node of every rank.
        bridges: Holes that are read along.
        has_page_cache: Whether ranks of a node that read the same bytes fetch them once.
    """
    num_nodes = _count(node_of)
    rank_bytes, rank_requests = np.zeros_like(node_of), np.zeros_like(node_of)
    node_bytes, node_requests = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64)
    for pattern in shape.patterns:
        parts, count = pattern.parts, pattern.num_tensors
        cover_of_rank = _by_rank(parts.cover, pattern.part_of_rank, default=-1)
        rank_bytes += count * _by_rank(parts.cover_bytes, cover_of_rank)
        rank_requests += count * _by_rank(parts.cover_runs, cover_of_rank)
        node_bytes += count * _union(parts.covers, cover_of_rank, node_of, num_nodes)
        node_requests += count * _union(Atoms(parts.cover_runs, None), cover_of_rank, node_of, num_nodes)
    for bridge in bridges:
        nodes = node_of[bridge.ranks]
        rank_bytes[bridge.ranks] += bridge.num * bridge.holes
        rank_requests[bridge.ranks] -= bridge.num
        node_bytes += bridge.num * _node_hole(bridge, nodes, num_nodes)
        _, first = np.unique(np.stack([nodes, bridge.kinds]), axis=1, return_index=True)
        node_requests -= bridge.num * np.bincount(nodes[first], minlength=num_nodes)
    if not has_page_cache:
        node_bytes = _by_group(rank_bytes, node_of, num_nodes)
        node_requests = _by_group(rank_requests, node_of, num_nodes)
    nothing = np.zeros_like(node_of)
    return Volume(node_bytes, node_requests, rank_bytes, np.zeros(num_nodes, np.int64), nothing, nothing)


def volume_whole(shape: JobShape, node_of: Ints, *, has_page_cache: bool) -> Volume:
    """Return what it takes to read all of every file of which anything is wanted."""
    num_nodes = _count(node_of)
    touched = np.zeros((len(shape.file_bytes), shape.world_size), np.bool_)
    for pattern in shape.patterns:
        touched[np.ix_(pattern.files, np.flatnonzero(pattern.part_of_rank >= 0))] = True
    rank_bytes = shape.file_bytes @ touched
    by_node = touched
    if has_page_cache:
        by_node = np.zeros((len(shape.file_bytes), num_nodes), np.bool_)
        for node in range(num_nodes):
            by_node[:, node] = touched[:, node_of == node].any(axis=1)
        node_of = np.arange(num_nodes)
    node_bytes = _by_group(shape.file_bytes @ by_node, node_of, num_nodes)
    node_requests = _by_group(by_node.sum(axis=0), node_of, num_nodes)
    nothing = np.zeros(shape.world_size, np.int64)
    return Volume(node_bytes, node_requests, rank_bytes, np.zeros(num_nodes, np.int64), nothing, nothing)


def volume_once(
    shape: JobShape, node_of: Ints, domain_of: Ints, bridges: Iterable[Bridge], *, thin_bytes: int
) -> Volume:
    """Return what it takes when each byte is read by one rank of a domain, and sent to the others that want it.

    What the same ranks want is read in equal shares by them; where runs are thin, by all that want anything of the
    tensor, in whole rows. A share is consecutive, so neighbours in a file are read in one run.

    Args:
        shape: The job.
        node_of: Node of every rank.
        domain_of: Domain of every rank: its node, or 0 for the whole job.
        bridges: Neighbours in a file; those without a hole between them are one run.
        thin_bytes: Runs of fewer bytes on average are thin.
    """
    num_nodes = _count(node_of)
    reads, requests, remote, local = (np.zeros(len(node_of)) for _ in range(4))
    for pattern in shape.patterns:
        for share in _shares(pattern, domain_of, thin_bytes):
            held = share.group_of_rank >= 0
            num_here = _num_alike(share.group_of_rank, domain_of)
            num_near = _num_alike(share.group_of_rank, node_of)
            each = np.where(held, pattern.num_tensors / np.maximum(num_here, 1), 0)
            reads += share.read * each
            requests += share.runs * each
            remote += share.wanted * each * (num_here - num_near)
            local += share.wanted * each * np.maximum(num_near - 1, 0)
    for bridge in bridges:
        touching = bridge.ranks[bridge.holes == 0]
        if len(touching):
            requests[touching] -= bridge.num / _num_alike(bridge.part_of_rank, domain_of)[touching]
    rank_bytes = _rounded(reads, domain_of)
    return Volume(
        node_bytes=_by_group(rank_bytes, node_of, num_nodes),
        node_requests=_by_group(np.maximum(np.ceil(requests), rank_bytes > 0).astype(np.int64), node_of, num_nodes),
        rank_bytes=rank_bytes,
        received_remote=np.rint(np.bincount(node_of, weights=remote, minlength=num_nodes)).astype(np.int64),
        received_local=np.rint(local).astype(np.int64),
        received=np.rint(local + remote).astype(np.int64),
    )


class _Share(NamedTuple):
    """Bytes that ranks of a domain read in equal shares; arrays of shape (world_size,).

    Attributes:
        group_of_rank: Ranks of equal number in a domain share; -1 for ranks that do not take part.
        wanted: Bytes of it that each rank wants.
        read: Bytes that each rank's group reads.
        runs: Runs that each rank's group reads.
    """

    group_of_rank: Ints
    wanted: Ints
    read: Ints
    runs: Ints


def _shares(pattern: Pattern, domain_of: Ints, thin_bytes: int) -> Iterator[_Share]:
    parts, part_of_rank, num_domains = pattern.parts, pattern.part_of_rank, _count(domain_of)
    union = _union(parts.atoms, part_of_rank, domain_of, num_domains)
    runs = _union(Atoms(parts.runs, None), part_of_rank, domain_of, num_domains)
    several = _union(Atoms(np.ones_like(parts.wanted), None), part_of_rank, domain_of, num_domains)
    row_runs = _runs_of_rows(pattern, union, domain_of)
    row_runs = np.where(row_runs, row_runs, runs // np.maximum(several, 1))
    rows = ((several > 1) & (union < runs * thin_bytes) & (row_runs < runs))[domain_of] & (part_of_rank >= 0)
    wanted = _by_rank(parts.wanted, part_of_rank)
    if rows.any():
        read = np.where(rows, union[domain_of], 0)
        yield _Share(np.where(rows, 0, -1), wanted, read, row_runs[domain_of])
    part_of_rank = np.where(rows, -1, part_of_rank)
    if parts.atoms.parts is None:
        yield _Share(part_of_rank, wanted, wanted, _by_rank(parts.runs, part_of_rank))
        return
    for size, members in zip(parts.atoms.num_bytes, parts.atoms.parts, strict=True):
        holds = np.isin(part_of_rank, members)
        atom = np.where(holds, size, 0)
        yield _Share(np.where(holds, 0, -1), atom, atom, holds.astype(np.int64))


def _runs_of_rows(pattern: Pattern, union: Ints, domain_of: Ints) -> Ints:
    """Return in how many runs each domain reads the rows its parts lie in; 0 where it does not want all of them."""
    num_domains = len(union)
    first, last, num_bytes, runs = pattern.parts.rows.T
    row_of_rank = _by_rank(pattern.parts.row, pattern.part_of_rank, default=-1)
    held = row_of_rank >= 0
    keys = _sorted_set(domain_of[held] * max(1, len(first)) + row_of_rank[held])
    domains, rows = np.divmod(keys, max(1, len(first)))
    order = np.lexsort((first[rows], domains))
    domains, rows = domains[order], rows[order]
    joined = (domains[1:] == domains[:-1]) & (first[rows[1:]] == last[rows[:-1]])
    found = _by_group(runs[rows], domains, num_domains) - _by_group(joined.astype(np.int64), domains[1:], num_domains)
    return np.where(_by_group(num_bytes[rows], domains, num_domains) == union, found, 0)


def _bridge(  # noqa: PLR0917 - one caller
    left: Pattern, right: Pattern, gap: int, ranks: Ints, seek_bytes: int, num: int
) -> Iterator[Bridge]:
    a, b = left.part_of_rank[ranks], right.part_of_rank[ranks]
    before, after = left.num_bytes - left.parts.last[a], right.parts.first[b]
    holes = before + gap + after
    bridged = (holes < seek_bytes) & left.parts.is_one_span[a] & right.parts.is_one_span[b]
    if bridged.any():
        yield Bridge(
            num=num,
            ranks=ranks[bridged],
            holes=holes[bridged],
            before=before[bridged],
            after=after[bridged],
            kinds=(a * len(right.parts.wanted) + b)[bridged],
            part_of_rank=left.part_of_rank,
        )


def _node_hole(bridge: Bridge, nodes: Ints, num_nodes: int) -> Ints:
    """Return the bytes of a hole that none of a node's ranks wants: what lies between the innermost of their parts."""
    before, after = (np.full(num_nodes, np.iinfo(np.int64).max) for _ in range(2))
    np.minimum.at(before, nodes, bridge.before)
    np.minimum.at(after, nodes, bridge.after)
    gap = int(bridge.holes[0] - bridge.before[0] - bridge.after[0])
    present = np.bincount(nodes, minlength=num_nodes) > 0
    return np.where(present, np.where(present, before, 0) + np.where(present, after, 0) + gap, 0)


def _by_rank(values: Ints, number_of_rank: Ints, default: int = 0) -> Ints:
    """Return the value of each rank's number, `default` for ranks without one."""
    return np.append(values, default)[number_of_rank]  # -1 picks what was appended


def _by_group(values: Ints, group_of: Ints, num_groups: int) -> Ints:
    """Return the sum of the values in each group."""
    sums = np.zeros(num_groups, np.int64)
    np.add.at(sums, group_of, values)
    return sums


def _union(atoms: Atoms, part_of_rank: Ints, group_of: Ints, num_groups: int) -> Ints:
    """Return the bytes that any rank of each group holds, each counted once."""
    sums = np.zeros(num_groups, np.int64)
    held = part_of_rank >= 0
    if atoms.parts is None:
        num_parts = max(1, len(atoms.num_bytes))
        keys = _sorted_set(group_of[held] * num_parts + part_of_rank[held])
        np.add.at(sums, keys // num_parts, atoms.num_bytes[keys % num_parts])
        return sums
    for size, parts in zip(atoms.num_bytes, atoms.parts, strict=True):
        sums[np.unique(group_of[np.isin(part_of_rank, parts)])] += size
    return sums


def _num_alike(number_of_rank: Ints, group_of: Ints) -> Ints:
    """Return for each rank how many of its group have its number, itself included; 0 for ranks without one."""
    held = number_of_rank >= 0
    keys = group_of * (number_of_rank.max(initial=0) + 1) + number_of_rank
    ordered = np.sort(keys[held])
    alike = ordered.searchsorted(keys, "right") - ordered.searchsorted(keys, "left")
    return np.where(held, alike, 0)


def _sorted_set(keys: Ints) -> Ints:
    """Return each key once, ascending: `np.unique`, which takes five times as long for a few ranks."""
    ordered = np.sort(keys)
    is_new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def _distinct(keys: Ints) -> tuple[Ints, Ints]:
    found, counts = np.unique(keys, axis=1, return_counts=True)
    return found.T, counts


def _rounded(values: Floats, domain_of: Ints) -> Ints:
    """Return whole numbers, each within one of its value, with the same sum in every domain, where it is whole."""
    order = np.argsort(domain_of, kind="stable")
    found = np.zeros(len(values), np.int64)
    found[order] = np.diff(np.rint(np.cumsum(values[order])).astype(np.int64), prepend=0)
    return found


def _count(group_of: Ints) -> int:
    return int(group_of.max(initial=-1)) + 1
