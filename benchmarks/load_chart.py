"""Draws the load benchmark's results as a picture.

    python -m benchmarks.load_chart docs/explanation/load-times.svg benchmarks/results/load_torch-dense-1gb.jsonl

A panel per file and state of the page cache, a bar per loader: the median over rounds of its seconds, and a line from
the fastest round to the slowest. The `limit` is what the machine does without a library.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.load_table import CACHES, times_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.load_table import Rounds

LABELS = {
    "shardferry_model": "shardferry load_model",
    "shardferry_state_dict": "shardferry load_state_dict",
    "safetensors": "safetensors get_slice",
    "torch_dcp": "torch DCP",
    "transformers": "transformers tp_plan",
    "limit": "preadv, no library",
}
KINDS = {"dense": "dense", "moe": "a tensor per expert", "moe_packed": "packed experts"}
OURS, PEERS, LIMIT, INK = "#1f6feb", "#9aa4b2", "#d8dee4", "#24292f"
# In pixels.
LABEL_WIDTH, BARS_WIDTH, VALUE_WIDTH = 190, 260, 70
ROW, BAR, TITLE, GAP = 22, 14, 34, 24


class Panel(NamedTuple):
    """One group of bars."""

    title: str
    times: dict[str, Rounds]


def main() -> None:
    """Write the picture that the arguments name."""
    target, *sources = map(Path, sys.argv[1:])
    target.write_text(draw([list(panels(source)) for source in sources]))


def panels(source: Path) -> Iterator[Panel]:
    """Yield what one file says of either state of the page cache."""
    first, *records = (json.loads(line) for line in source.read_text().splitlines())
    for cache in CACHES:
        title = f"{KINDS[first['kind']]}, {first['scale_gb']:g} GB, {cache} page cache"
        yield Panel(title, times_of(records, cache))


def draw(rows: Sequence[Sequence[Panel]]) -> str:
    """Return a picture with a row of panels for every file."""
    width = LABEL_WIDTH + BARS_WIDTH + VALUE_WIDTH
    parts: list[str] = []
    top = 0
    for row in rows:
        for at, panel in enumerate(row):
            parts += _panel(panel, at * (width + GAP), top)
        top += TITLE + ROW * max(len(panel.times) for panel in row) + GAP
    size = f'width="{2 * width + GAP}" height="{top}" viewBox="0 0 {2 * width + GAP} {top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13" fill="{INK}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: int, top: int) -> Iterator[str]:
    longest = max(seconds for rounds in panel.times.values() for seconds in rounds.values())
    yield _text(panel.title, left + LABEL_WIDTH, top + 20, weight="bold")
    for at, name in enumerate(name for name in LABELS if name in panel.times):
        seconds = panel.times[name].values()
        middle = statistics.median(seconds)
        shortest, most, length = (s * BARS_WIDTH / longest for s in (min(seconds), max(seconds), middle))
        y, x = top + TITLE + at * ROW, left + LABEL_WIDTH
        color = OURS if name.startswith("shardferry") else LIMIT if name == "limit" else PEERS
        yield _text(LABELS[name], x - 8, y + BAR - 3, anchor="end")
        yield f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{color}"/>'
        middle_y = y + BAR / 2
        yield f'<path d="M{x + shortest:.1f} {middle_y}H{x + most:.1f}" stroke="{INK}" stroke-width="1.5"/>'
        yield _text(f"{middle:.2f} s", x + most + 6, y + BAR - 3)


def _text(text: str, x: float, y: float, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
