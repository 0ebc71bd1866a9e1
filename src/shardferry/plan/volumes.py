"""Bytes and requests of each way of reading, as sums over the patterns of a job.

Where nodes have a page cache, what several ranks of one fetch crosses the storage link once. Where they have none,
every rank fetches for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.plan.bridges import distinct
from shardferry.plan.patterns import Atoms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from shardferry.plan.bridges import Bridges
    from shardferry.plan.patterns import Ints, JobShape, Parts

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


class Holdings(NamedTuple):
    """Who holds which part of the patterns that are cut alike; arrays of shape (num_holdings,), by pattern and rank.

    Attributes:
        parts: What all of these patterns are cut into.
        patterns: Number of the pattern.
        num_tensors: How many tensors it has.
        ranks: Who holds.
        held: Which part.
    """

    parts: Parts
    patterns: Ints
    num_tensors: Ints
    ranks: Ints
    held: Ints


def holdings_of(shape: JobShape) -> tuple[Holdings, ...]:
    """Return who holds what: patterns that are cut alike together, as groups of other ranks may cut alike."""
    alike: dict[int, list[int]] = {}
    for number, pattern in enumerate(shape.patterns):
        alike.setdefault(id(pattern.parts), []).append(number)
    return tuple(_holdings(shape, np.array(numbers)) for numbers in alike.values())


def wanted_by_rank(holdings: Iterable[Holdings], world_size: int) -> Ints:
    """Return the bytes each rank wants, of shape (world_size,)."""
    wanted = np.zeros(world_size, np.int64)
    for some in holdings:
        np.add.at(wanted, some.ranks, some.num_tensors * some.parts.wanted[some.held])
    return wanted


def wanted_by_group(holdings: Iterable[Holdings], group_of: Ints) -> Ints:
    """Return the bytes that any rank of each group wants, each counted once, of shape (num_groups,)."""
    wanted = np.zeros(_count(group_of), np.int64)
    for some in holdings:
        spots = _spots(some, group_of)
        np.add.at(wanted, spots.group, spots.num_tensors * _union(some.parts.atoms, some.held, spots))
    return wanted


def volume_independent(
    holdings: Iterable[Holdings], node_of: Ints, bridges: Iterable[Bridges], *, has_page_cache: bool
) -> Volume:
    """Return what it takes when every rank reads its own bytes, and holes that are cheaper than a seek.

    Args:
        holdings: Who holds what.
        node_of: Node of every rank.
        bridges: Holes that are read along.
        has_page_cache: Whether ranks of a node that read the same bytes fetch them once.
    """
    num_nodes = _count(node_of)
    rank_bytes, rank_requests = np.zeros_like(node_of), np.zeros_like(node_of)
    node_bytes, node_requests = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64)
    for some in holdings:
        parts, nodes = some.parts, _spots(some, node_of)
        cover = parts.cover[some.held]
        runs = _union(Atoms(parts.cover_runs, None), cover, nodes)
        np.add.at(rank_bytes, some.ranks, some.num_tensors * parts.cover_bytes[cover])
        np.add.at(rank_requests, some.ranks, some.num_tensors * parts.cover_runs[cover])
        np.add.at(node_bytes, nodes.group, nodes.num_tensors * _union(parts.covers, cover, nodes))
        np.add.at(node_requests, nodes.group, nodes.num_tensors * runs)
    for bridge in bridges:
        np.add.at(rank_bytes, bridge.ranks, bridge.num * (bridge.before + bridge.gap + bridge.after))
        np.subtract.at(rank_requests, bridge.ranks, bridge.num)
        of_rank = node_of[bridge.ranks]
        node_bytes += _node_holes(bridge, of_rank, num_nodes)
        first, _ = distinct(bridge.kind, of_rank, bridge.part, bridge.next_part)
        np.subtract.at(node_requests, of_rank[first], bridge.num[first])
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
    holdings: Iterable[Holdings], node_of: Ints, domain_of: Ints, bridges: Iterable[Bridges], *, thin_bytes: int
) -> Volume:
    """Return what it takes when each byte is read by one rank of a domain, and sent to the others that want it.

    What the same ranks want is read in equal shares by them; where runs are thin, by all that want anything of the
    tensor, in whole rows. A share is consecutive, so neighbours in a file are read in one run.

    Args:
        holdings: Who holds what.
        node_of: Node of every rank.
        domain_of: Domain of every rank: its node, or 0 for the whole job.
        bridges: Neighbours in a file; those without a hole between them are one run.
        thin_bytes: Runs of fewer bytes on average are thin.
    """
    holdings = tuple(holdings)
    num_nodes = _count(node_of)
    reads, requests, remote, local = (np.zeros(len(node_of)) for _ in range(4))
    num_patterns = max((int(some.patterns.max(initial=-1)) for some in holdings), default=-1) + 1
    num_sharing = np.zeros((num_patterns, len(node_of)), np.int64)
    for some in holdings:
        domains, nodes = _spots(some, domain_of), _spots(some, node_of)
        num_sharing[some.patterns, some.ranks] = _num_alike(some.held, domains.of)
        for share in _shares(some, domains, thin_bytes):
            num_here, num_near = _num_alike(share.group, domains.of), _num_alike(share.group, nodes.of)
            each = np.where(share.group >= 0, some.num_tensors / np.maximum(num_here, 1), 0)
            np.add.at(reads, some.ranks, share.read * each)
            np.add.at(requests, some.ranks, share.runs * each)
            np.add.at(remote, some.ranks, share.wanted * each * (num_here - num_near))
            np.add.at(local, some.ranks, share.wanted * each * np.maximum(num_near - 1, 0))
    for bridge in bridges:
        touching = bridge.before + bridge.gap + bridge.after == 0
        ranks = bridge.ranks[touching]
        np.subtract.at(requests, ranks, bridge.num[touching] / num_sharing[bridge.left[touching], ranks])
    rank_bytes = _rounded(reads, domain_of)
    return Volume(
        node_bytes=_by_group(rank_bytes, node_of, num_nodes),
        node_requests=_by_group(np.maximum(np.ceil(requests), rank_bytes > 0).astype(np.int64), node_of, num_nodes),
        rank_bytes=rank_bytes,
        received_remote=np.rint(np.bincount(node_of, weights=remote, minlength=num_nodes)).astype(np.int64),
        received_local=np.rint(local).astype(np.int64),
        received=np.rint(local + remote).astype(np.int64),
    )


class _Spots(NamedTuple):
    """Where patterns are held: one spot for every pattern and every group of ranks that holds some of it.

    Attributes:
        of: Shape (num_holdings,): the spot each holding is at.
        group: Shape (num_spots,).
        num_tensors: Shape (num_spots,): how many tensors the pattern has.
    """

    of: Ints
    group: Ints
    num_tensors: Ints


class _Share(NamedTuple):
    """Bytes that ranks of a domain read in equal shares; arrays of shape (num_holdings,).

    Attributes:
        group: Holdings of equal number at one spot share; -1 for those that do not take part.
        wanted: Bytes of it that each rank wants.
        read: Bytes that each rank's group reads.
        runs: Runs that each rank's group reads.
    """

    group: Ints
    wanted: Ints
    read: Ints
    runs: Ints


def _holdings(shape: JobShape, numbers: Ints) -> Holdings:
    patterns = [shape.patterns[number] for number in numbers]
    parts = np.array([pattern.part_of_rank for pattern in patterns], np.int64)
    which, ranks = np.nonzero(parts >= 0)
    num_tensors = np.array([pattern.num_tensors for pattern in patterns], np.int64)
    return Holdings(patterns[0].parts, numbers[which], num_tensors[which], ranks, parts[which, ranks])


def _spots(some: Holdings, group_of: Ints) -> _Spots:
    num_groups = _count(group_of)
    keys = some.patterns * num_groups + group_of[some.ranks]
    found = _sorted_set(keys)
    of = np.searchsorted(found, keys)
    num_tensors = np.zeros(len(found), np.int64)
    num_tensors[of] = some.num_tensors
    return _Spots(of, found % max(1, num_groups), num_tensors)


def _shares(some: Holdings, domains: _Spots, thin_bytes: int) -> Iterator[_Share]:
    parts, held = some.parts, some.held
    union = _union(parts.atoms, held, domains)
    runs = _union(Atoms(parts.runs, None), held, domains)
    several = _union(Atoms(np.ones_like(parts.wanted), None), held, domains)
    row_runs = _runs_of_rows(some, union, domains)
    row_runs = np.where(row_runs, row_runs, runs // np.maximum(several, 1))
    rows = ((several > 1) & (union < runs * thin_bytes) & (row_runs < runs))[domains.of]
    wanted = parts.wanted[held]
    if rows.any():
        yield _Share(np.where(rows, 0, -1), wanted, union[domains.of], row_runs[domains.of])
    if parts.atoms.parts is None:
        yield _Share(np.where(rows, -1, held), wanted, wanted, parts.runs[held])
        return
    for size, members in zip(parts.atoms.num_bytes, parts.atoms.parts, strict=True):
        holds = np.isin(held, members) & ~rows
        atom = np.where(holds, size, 0)
        yield _Share(np.where(holds, 0, -1), atom, atom, holds.astype(np.int64))


def _runs_of_rows(some: Holdings, union: Ints, domains: _Spots) -> Ints:
    """Return in how many runs each spot reads the rows its parts lie in; 0 where it does not want all of them."""
    num_spots = len(union)
    first, last, num_bytes, runs = some.parts.rows.T
    spots, rows = np.divmod(_sorted_set(domains.of * len(first) + some.parts.row[some.held]), max(1, len(first)))
    order = np.lexsort((first[rows], spots))
    spots, rows = spots[order], rows[order]
    joined = (spots[1:] == spots[:-1]) & (first[rows[1:]] == last[rows[:-1]])
    found = _by_group(runs[rows], spots, num_spots) - _by_group(joined.astype(np.int64), spots[1:], num_spots)
    return np.where(_by_group(num_bytes[rows], spots, num_spots) == union, found, 0)


def _node_holes(some: Bridges, nodes: Ints, num_nodes: int) -> Ints:
    """Return the bytes of holes that none of a node's ranks wants: what lies between the innermost of their parts."""
    keys = some.kind * num_nodes + nodes
    found = _sorted_set(keys)
    of = np.searchsorted(found, keys)
    before, after = (np.full(len(found), np.iinfo(np.int64).max) for _ in range(2))
    np.minimum.at(before, of, some.before)
    np.minimum.at(after, of, some.after)
    num, gap = np.zeros_like(found), np.zeros_like(found)
    num[of], gap[of] = some.num, some.gap
    return _by_group(num * (before + gap + after), found % max(1, num_nodes), num_nodes)


def _by_group(values: Ints, group_of: Ints, num_groups: int) -> Ints:
    """Return the sum of the values in each group."""
    sums = np.zeros(num_groups, np.int64)
    np.add.at(sums, group_of, values)
    return sums


def _union(atoms: Atoms, held: Ints, spots: _Spots) -> Ints:
    """Return the bytes of a tensor that any rank at each spot holds, each counted once, of shape (num_spots,)."""
    sums = np.zeros(len(spots.group), np.int64)
    if atoms.parts is None:
        num_parts = max(1, len(atoms.num_bytes))
        keys = _sorted_set(spots.of * num_parts + held)
        np.add.at(sums, keys // num_parts, atoms.num_bytes[keys % num_parts])
        return sums
    for size, parts in zip(atoms.num_bytes, atoms.parts, strict=True):
        sums[_sorted_set(spots.of[np.isin(held, parts)])] += size
    return sums


def _num_alike(number: Ints, spot: Ints) -> Ints:
    """Return for each holding how many at its spot have its number, itself included; 0 for those without a number."""
    takes_part = number >= 0
    keys = spot * (number.max(initial=0) + 1) + number
    ordered = np.sort(keys[takes_part])
    alike = ordered.searchsorted(keys, "right") - ordered.searchsorted(keys, "left")
    return np.where(takes_part, alike, 0)


def _sorted_set(keys: Ints) -> Ints:
    """Return each key once, ascending: `np.unique`, which takes five times as long for a few ranks."""
    ordered = np.sort(keys)
    is_new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def _rounded(values: Floats, domain_of: Ints) -> Ints:
    """Return whole numbers, each within one of its value, with the same sum in every domain, where it is whole."""
    order = np.argsort(domain_of, kind="stable")
    found = np.zeros(len(values), np.int64)
    found[order] = np.diff(np.rint(np.cumsum(values[order])).astype(np.int64), prepend=0)
    return found


def _count(group_of: Ints) -> int:
    return int(group_of.max(initial=-1)) + 1
