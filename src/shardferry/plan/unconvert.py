"""Plan a save by conversion rules: the tensors to write, and where their elements are in those the ranks hold.

Pure, and the same on every rank. The rules lead from the checkpoint to the model, as for a load, and are reversed here.
What they make must lead back to the very tensors the ranks hold, so that nothing is written under a name or a shape
from which it could not be loaded again.

What rules only move is written from where it lies. What they compute is on no rank: one is chosen for each such
tensor, which gets what it is computed from, and then holds it as if it were one of the model's.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from shardferry.convert.align import Aligned, aligned_parts
from shardferry.convert.ops import Computed, Stored, leaves, replace_computed
from shardferry.convert.table import Conversions, describe_rule, to_checkpoint, to_model
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError
from shardferry.format.dtypes import BITS, tensor_bytes
from shardferry.format.problem import listed
from shardferry.geometry.pieces import intersect
from shardferry.geometry.region import Region, positions, select
from shardferry.geometry.sharding import MeshLayout
from shardferry.geometry.spans import BITS_PER_BYTE
from shardferry.plan.catalogue import Held, MadePart
from shardferry.plan.match import natural_key
from shardferry.plan.save import check_whole, pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.convert.ops import Expression
    from shardferry.convert.rules import Rule

LISTED = 5

Rules: TypeAlias = "Sequence[Rule] | Conversions"


class Made(NamedTuple):
    """A tensor that is computed for others to be written from.

    Attributes:
        source: What it is.
        operands: Where the elements of each operand are, in order.
        owner: The rank that computes it from whole operands, and holds it until it is written.
    """

    source: Computed
    operands: tuple[Held, ...]
    owner: int


class Unconverted(NamedTuple):
    """What a save by conversion rules writes.

    Attributes:
        written: The tensors to write, in natural order of their names.
        made: What has to be computed for them first, by name, in an order in which that can be done.
        unmatched: The rules that change none of them.
    """

    written: dict[str, Held]
    made: dict[str, Made]
    unmatched: tuple[str, ...]


class _Making(NamedTuple):
    """What has been found so far.

    Attributes:
        known: The tensors that others can be written from, by name: the model's, and those that are computed.
        made: Of these, how the latter are computed.
        names: Their names.
        bytes_by_rank: How many bytes each rank computes.
    """

    known: dict[str, Held]
    made: dict[str, Made]
    names: dict[Computed, str]
    bytes_by_rank: Counter[int]


def unconvert(catalogue: Mapping[str, Held], rules: Rules) -> Unconverted:
    """Return what is written of a model by rules.

    Args:
        catalogue: Every tensor of the job, by the model's name.
        rules: Rules that lead from the checkpoint to the model.

    Raises:
        InvalidInputError: If rules cannot be undone, do not fit the model, leave a tensor behind that belongs to one
            they take, or would not give the model again.
        ShardingError: If elements of a tensor are on no rank.
    """
    model = {name: Tensor(name, held.dtype, Stored(name, held.shape)) for name, held in catalogue.items()}
    converted = to_checkpoint(model, rules)
    if converted.left:
        raise InvalidInputError(
            f"{listed(converted.left, LISTED)}: no rule says under which name to save it, but it belongs to a tensor "
            "that the rules save under another name. Add a rule for it"
        )
    _check_way_back(model, converted.tensors, rules)
    making = _Making(dict(catalogue), {}, {}, Counter())
    written = {}
    for name in sorted(converted.tensors, key=natural_key):
        tensor = converted.tensors[name]
        written[name] = _written(name, tensor._replace(source=_moved(tensor.source, making)), making.known)
    return Unconverted(written, making.made, tuple(map(describe_rule, converted.unmatched)))


def _check_way_back(model: Mapping[str, Tensor], written: Mapping[str, Tensor], rules: Rules) -> None:
    stored = {name: Tensor(name, tensor.dtype, Stored(name, tensor.shape)) for name, tensor in written.items()}
    again = to_model(stored, rules).tensors
    for name, tensor in model.items():
        if name not in again:
            raise InvalidInputError(f"{name} would be saved under a name from which the rules do not give it again")
        if again[name].shape != tensor.shape:
            raise InvalidInputError(
                f"{name} of shape {list(tensor.shape)} would be saved so that the rules give it shape "
                f"{list(again[name].shape)} again"
            )
    unknown = sorted(again.keys() - model.keys())
    if unknown:
        raise InvalidInputError(f"the rules would save {listed(unknown, LISTED)}, which the model does not have")


def _moved(source: Expression, making: _Making) -> Expression:
    """Return an expression that only moves elements, of tensors known and of computed ones, which are added to them."""
    known, made, names, bytes_by_rank = making

    def stand_in(node: Computed) -> Stored:
        if node not in names:
            tensors = zip(node.dtypes, (_moved(operand, making) for operand in node.operands), strict=True)
            operands = tuple(_written(node.function.name, Tensor("", *tensor), known) for tensor in tensors)
            for held in operands:
                check_whole(held.memory, held)
            numbered = (f"{node.function.name} {number}" for number in count(len(made)))
            name = next(name for name in numbered if name not in known)
            owner = _least_loaded(operands, bytes_by_rank)
            bytes_by_rank[owner] += tensor_bytes(node.dtype, node.shape)
            names[node], made[name] = name, Made(node, operands, owner)
            known[name] = Held(node.dtype, node.shape, MeshLayout((1,), (owner,), ()), (owner,))
        return Stored(names[node], node.shape)

    return replace_computed(source, stand_in)


def _least_loaded(operands: Sequence[Held], bytes_by_rank: Counter[int]) -> int:
    """Return which of the ranks that have some of the operands is to compute the fewest bytes so far."""
    ranks = {rank for held in operands for rank in held.ranks} or {0}
    return min(sorted(ranks), key=lambda rank: bytes_by_rank[rank])


def _written(name: str, tensor: Tensor, known: Mapping[str, Held]) -> Held:
    source = tensor.source
    if isinstance(source, Stored) and source.shape == known[source.key].shape:
        held = known[source.key]
        return Held(held.dtype, held.shape, held.layout, held.ranks, source.key)
    if BITS[tensor.dtype] % BITS_PER_BYTE:
        raise InvalidInputError(
            f"{name}: {tensor.dtype} packs several elements into a byte, which rules cannot take apart"
        )
    shapes = {leaf.key: known[leaf.key].shape for leaf in leaves(source)}
    parts = tuple(part for piece in aligned_parts(source, shapes) for part in _parts(piece, known))
    ranks = tuple(sorted({rank for part in parts for rank in part.ranks}))
    return Held(tensor.dtype, tensor.shape, None, ranks, "", parts)


def _parts(piece: Aligned, known: Mapping[str, Held]) -> Iterator[MadePart]:
    """Yield what each rank, or set of ranks with the same elements, has of a piece."""
    if piece.key is None:
        return
    held = known[piece.key]
    check_whole(piece.key, held)
    for origin, ranks in _common(held, piece.origin):
        dims = list(piece.region.dims)
        for dim, axis in enumerate(piece.axes):
            if axis >= 0:
                runs = positions(origin.dims[axis], piece.origin.dims[axis])
                dims[dim] = tuple(interval for run in runs for interval in select(piece.region.dims[dim], *run))
        yield MadePart(piece.key, held, Region(tuple(dims)), origin, piece.axes, ranks)


@lru_cache(maxsize=65536)
def _common(held: Held, origin: Region) -> tuple[tuple[Region, tuple[int, ...]], ...]:
    """Return what the ranks' pieces of a tensor have in common with a region of it."""
    pieces = ((intersect(piece.region, origin), piece.ranks) for piece in pieces_of(held, BITS[held.dtype]))
    return tuple((common, ranks) for common, ranks in pieces if common is not None)
