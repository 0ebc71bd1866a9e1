"""Whether all ranks mean the same tensors: tables small enough to exchange among a thousand ranks.

A model has few patterns: combinations of shape, dtype and layout. A rank tells per pattern how many names it has and
a hash of the set of names, never the names. Where not every rank that could have a pattern tells the same, hashes of
single names follow, to find a name that ranks put under different patterns; only such a name is ever sent itself.

The names a rank uses of the checkpoint travel as a bit set over the index that all ranks share.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.errors import ShardingError
from shardferry.geometry.sharding import MeshLayout
from shardferry.plan.match import Matching, Problems, natural_key
from shardferry.plan.target import Layout, Target, fitting_layouts, holders_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardferry.format.index import CheckpointIndex

# Names a rank tells of a pattern on which ranks disagree; enough to find the first difference of real models.
MAX_EXPLAINED = 2000
# Names of all ranks together up to which their hashes go along with the tables and spare an exchange: 512 KiB.
MAX_HASHES_ALONG = 32_768


class Row(NamedTuple):
    """What one rank says of one pattern.

    Attributes:
        pattern: Hash of shape, dtype and layouts.
        num_holders: Ranks the layout names; 0 for tensors nobody declared to be cut.
        num_layouts: Layouts the notation can mean.
        fits: Bit i is set if the local sizes of all the rank's tensors fit layout i.
        num_tensors: Tensors of the pattern on this rank.
        names: Sum of the hashes of their names, modulo 2**64.
    """

    pattern: int
    num_holders: int
    num_layouts: int
    fits: int
    num_tensors: int
    names: int


@dataclass(frozen=True, slots=True)
class Table:
    """All that a rank tells the others about its targets.

    Attributes:
        rows: One per pattern.
        used: Bit set over the checkpoint's names: what this rank's targets are made of.
        ignored: Bit set likewise: what its model does not load on purpose.
        hashes: What `name_hashes` says of all patterns, as text, if that is little enough to send along; else empty.
        problems: What does not fit on this rank.
    """

    rows: tuple[Row, ...]
    used: str
    ignored: str
    hashes: str
    problems: Problems


def make_table(index: CheckpointIndex, matching: Matching, rank: int, world_size: int) -> Table:
    """Return what this rank of a group has to tell."""
    groups: dict[int, list[Target]] = defaultdict(list)
    fits: dict[int, int] = {}
    for target, source, _ in matching.matches:
        pattern = pattern_of(target)
        groups[pattern].append(target)
        if target.layouts:
            mask = sum(1 << index for index in fitting_layouts(target, source.shape, rank))
            fits[pattern] = fits.get(pattern, mask) & mask
    rows = tuple(_row(pattern, targets, fits.get(pattern, 0)) for pattern, targets in groups.items())
    used, ignored = (_pack(index, names) for names in (matching.used, matching.ignored))
    hashes = ""
    if len(matching.matches) * world_size <= MAX_HASHES_ALONG:
        hashes = _text(name_hashes([target for target, _, _ in matching.matches], frozenset(groups)))
    return Table(rows, used, ignored, hashes, matching.problems)


def table_to_bytes(table: Table) -> bytes:
    """Return the table for other ranks to decode."""
    told = [table.rows, table.used, table.ignored, table.hashes, asdict(table.problems)]
    return json.dumps(told, separators=(",", ":")).encode()


def table_from_bytes(data: bytes) -> Table:
    """Return the table that `table_to_bytes` encoded."""
    rows, used, ignored, hashes, problems = json.loads(data)
    return Table(tuple(Row(*row) for row in rows), used, ignored, hashes, Problems(**problems))


def names_in(index: CheckpointIndex, packed: Iterable[str]) -> list[str]:
    """Return the checkpoint's names that any of the bit sets contains, in the index's order."""
    names = list(index.tensors)
    union = np.zeros(-(-len(names) // 8), np.uint8)
    for bits in packed:
        union |= np.frombuffer(zlib.decompress(base64.b64decode(bits)), np.uint8)
    return [names[position] for position in np.flatnonzero(np.unpackbits(union, count=len(names)))]


def disputed(tables: Sequence[Table]) -> frozenset[int]:
    """Return the patterns that not all ranks tell alike; the same on every rank that has all tables.

    That need not be an error: a rank may have only some names, as with pipeline stages or experts. But a name that
    ranks put under different patterns can only be among these.
    """
    told: dict[int, list[Row]] = defaultdict(list)
    for table in tables:
        for row in table.rows:
            told[row.pattern].append(row)
    return frozenset(pattern for pattern, rows in told.items() if not _all_tell(rows, len(tables)))


def name_hashes(targets: Iterable[Target], patterns: frozenset[int]) -> bytes:
    """Return the hashes of the names this rank has under disputed patterns, for `contradicted`."""
    pairs = [(hash_names([target.name]), pattern_of(target)) for target in targets]
    return np.array([pair for pair in pairs if pair[1] in patterns], np.uint64).tobytes()


def hashes_along(tables: Sequence[Table]) -> list[bytes] | None:
    """Return what `name_hashes` said on every rank, if all have sent it along."""
    if any(table.rows and not table.hashes for table in tables):
        return None
    return [base64.b64decode(table.hashes) for table in tables]


def contradicted(told: Sequence[bytes]) -> frozenset[int]:
    """Return the hashes of names that ranks put under different patterns.

    Args:
        told: What `name_hashes` returned on every rank.
    """
    pairs = np.unique(np.frombuffer(b"".join(told), np.uint64).reshape(-1, 2), axis=0)
    again = pairs[1:, 0] == pairs[:-1, 0]
    return frozenset(pairs[1:, 0][again].tolist())


def choose_layouts(tables: Sequence[Table]) -> dict[int, tuple[int, ...]]:
    """Return, for every pattern that a layout cuts, the layouts that fit the local sizes on all ranks."""
    fits: dict[int, int] = {}
    for table in tables:
        for row in table.rows:
            if row.num_holders:
                fits[row.pattern] = fits.get(row.pattern, row.fits) & row.fits
    return {pattern: tuple(i for i in range(mask.bit_length()) if mask >> i & 1) for pattern, mask in fits.items()}


def check_choice(target: Target, fitting: Sequence[int], rank: int) -> int:
    """Return the one layout of a target that fits, as an index.

    Raises:
        ShardingError: If none fits, or several do and nothing tells them apart.
    """
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        message = (
            f"{target.name}: its placements can mean two layouts that differ, (FSDP2 over tensor parallel cuts the "
            "tensor-parallel axis first, distribute_tensor the first axis), and the local sizes fit both. Pass "
            "model= (the sharded model the state dict comes from) or shardings= to say which"
        )
        raise ShardingError(message)
    message = (
        f"{target.name}: rank {rank} holds a local tensor of shape {list(target.local_shape)}, which its layout "
        f"{describe_layout(target)} does not give, or does not give on every rank. Check the placements, or give the "
        "true layout with shardings="
    )
    raise ShardingError(message)


def explain(targets: Iterable[Target], hashes: frozenset[int]) -> bytes:
    """Return the names and layouts this rank has of contradicted names, for `raise_contradiction`."""
    mine = [(target.name, describe_layout(target)) for target in targets if hash_names([target.name]) in hashes]
    return json.dumps(sorted(mine, key=lambda item: natural_key(item[0]))[:MAX_EXPLAINED]).encode()


def raise_contradiction(told: Sequence[bytes]) -> None:
    """Raise the error that names the first tensor on which ranks disagree, and the ranks.

    Args:
        told: What `explain` returned on every rank, in rank order.

    Raises:
        ShardingError: Always.
    """
    by_name: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, data in enumerate(told):
        for name, text in json.loads(data):
            by_name[name][text].append(rank)
    name = min(by_name, key=natural_key)
    said = "; ".join(f"ranks {_ranges(ranks)} have {text}" for text, ranks in by_name[name].items())
    message = f"ranks disagree about {name}: {said}. Build the same model with the same mesh on every rank"
    raise ShardingError(message)


def pattern_of(target: Target) -> int:
    """Return a 62-bit hash of everything about a target but its name."""
    return _pattern(target.dtype, target.shape, target.layouts, () if target.layouts else target.local_shape)


def hash_names(names: Iterable[str]) -> int:
    """Return a hash of a set of names that does not depend on their order."""
    total = sum(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") for name in names)
    return total % (1 << 64)


def describe_layout(target: Target) -> str:
    """Return a target's dtype, shape and layout in words for an error."""
    words = f"{target.dtype} {list(target.local_shape if target.shape is None else target.shape)}"
    if not target.layouts:
        return f"{words} as a plain tensor"
    layout = target.layouts[0]
    if not isinstance(layout, MeshLayout):
        return f"{target.dtype} {list(layout.shape)} with a sharding given for {len(layout.regions)} ranks"
    cuts = ", ".join(f"dim {cut.dim} over axis {cut.axis}" for cut in layout.splits) or "replicated"
    return f"{words} on a mesh of shape {layout.mesh_shape} ({cuts})"


@lru_cache(maxsize=4096)
def _pattern(dtype: str, shape: tuple[int, ...] | None, layouts: tuple[Layout, ...], local: tuple[int, ...]) -> int:
    text = repr((dtype, shape, layouts, local))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def _row(pattern: int, targets: Sequence[Target], fits: int) -> Row:
    layouts = targets[0].layouts
    holders = len(holders_of(layouts[0])) if layouts else 0
    return Row(pattern, holders, len(layouts), fits, len(targets), hash_names(target.name for target in targets))


def _all_tell(rows: Sequence[Row], world_size: int) -> bool:
    expected = rows[0].num_holders or world_size
    return len(rows) == expected and len({(row.num_tensors, row.names) for row in rows}) == 1


def _pack(index: CheckpointIndex, names: frozenset[str]) -> str:
    bits = np.fromiter((name in names for name in index.tensors), np.bool_, len(index.tensors))
    return _text(zlib.compress(np.packbits(bits).tobytes(), 1))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _ranges(ranks: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
