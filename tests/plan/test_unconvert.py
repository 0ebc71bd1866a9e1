"""Plan a save by conversion rules of which many compute."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from shardferry.conversions import Convert, Custom
from shardferry.geometry.sharding import MeshLayout, Split
from shardferry.plan.catalogue import Held
from shardferry.plan.unconvert import unconvert

if TYPE_CHECKING:
    from numpy.typing import NDArray

COUNT, RANKS, SHAPE = 40, (0, 1, 2, 3), (8, 4)


class Compared:  # noqa: PLW1641 - a callable need not have a hash
    """A function that counts how often it is compared with another, and so has no hash."""

    num_compared = 0

    def __call__(self, arrays: list[NDArray[Any]]) -> NDArray[Any]:
        return arrays[0]

    def __eq__(self, other: object) -> bool:
        Compared.num_compared += 1
        return self is other


def test_many_functions_are_shared_out_evenly_and_not_compared_with_each_other() -> None:
    """Of 10,000 experts it would take minutes on every rank."""
    layout = MeshLayout((len(RANKS),), RANKS, (Split(0, 0),))
    catalogue = {f"{n}.w": Held("F32", SHAPE, layout, RANKS) for n in range(COUNT)}
    rules = []
    for n in range(COUNT):
        step = Custom(Compared(), SHAPE, "F32")
        rules.append(Convert((f"{n}.q",), (f"{n}.w",), (step,), back=Convert((f"{n}.w",), (f"{n}.q",), (step,))))

    Compared.num_compared = 0
    unconverted = unconvert(catalogue, rules)

    assert Compared.num_compared <= COUNT
    assert Counter(made.owner for made in unconverted.made.values()) == dict.fromkeys(RANKS, COUNT // len(RANKS))
