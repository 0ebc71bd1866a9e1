"""Plan a save by conversion rules: the tensors to write, and where their elements are in those the ranks hold.

Pure, and the same on every rank. The rules lead from the checkpoint to the model, as for a load, and are reversed here.
What they make must lead back to the very tensors the ranks hold, so that nothing is written under a name or a shape
from which it could not be loaded again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from shardferry.convert.align import Aligned, aligned_parts
from shardferry.convert.ops import Stored
from shardferry.convert.table import Conversions, describe_rule, to_checkpoint, to_model
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError
from shardferry.format.dtypes import BITS
from shardferry.format.problem import listed
from shardferry.geometry.pieces import intersect
from shardferry.geometry.region import Region, positions, select
from shardferry.geometry.spans import BITS_PER_BYTE
from shardferry.plan.catalogue import Held, MadePart
from shardferry.plan.match import natural_key
from shardferry.plan.save import check_whole, pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.convert.rules import Rule

LISTED = 5

Rules: TypeAlias = "Sequence[Rule] | Conversions"


def unconvert(catalogue: Mapping[str, Held], rules: Rules) -> tuple[dict[str, Held], tuple[str, ...]]:
    """Return the tensors to write, in natural order of their names, and the rules that change none of them.

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
    written = {name: _written(name, tensor, catalogue) for name, tensor in converted.tensors.items()}
    in_order = {name: written[name] for name in sorted(written, key=natural_key)}
    return in_order, tuple(map(describe_rule, converted.unmatched))


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


def _written(name: str, tensor: Tensor, catalogue: Mapping[str, Held]) -> Held:
    source = tensor.source
    if isinstance(source, Stored) and source.shape == catalogue[source.key].shape:
        held = catalogue[source.key]
        return Held(held.dtype, held.shape, held.layout, held.ranks, source.key)
    if BITS[tensor.dtype] % BITS_PER_BYTE:
        raise InvalidInputError(
            f"{name}: {tensor.dtype} packs several elements into a byte, which rules cannot take apart"
        )
    shapes = {key: held.shape for key, held in catalogue.items()}
    parts = tuple(part for piece in aligned_parts(source, shapes) for part in _parts(piece, catalogue))
    ranks = tuple(sorted({rank for part in parts for rank in part.ranks}))
    return Held(tensor.dtype, tensor.shape, None, ranks, "", parts)


def _parts(piece: Aligned, catalogue: Mapping[str, Held]) -> Iterator[MadePart]:
    """Yield what each rank, or set of ranks with the same elements, has of a piece."""
    if piece.key is None:
        return
    held = catalogue[piece.key]
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
