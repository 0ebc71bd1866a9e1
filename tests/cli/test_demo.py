"""What `shardferry demo` prints and when it fails, from results made by hand."""

from __future__ import annotations

import io
import math

from rich.console import Console

from shardferry.cli.demo import print_result
from shardferry.cli.demo_result import DemoResult, LoadResult, wrong_loads


def load_result(layout: str, max_difference: float) -> LoadResult:
    return {
        "layout": layout,
        "loader": "shardferry",
        "bytes_read": [22_714_752, 22_710_144],
        "seconds": 0.13,
        "peak_memory_bytes": [63_254_528, 63_270_912],
        "max_difference": max_difference,
        "min_cosine": 1.0,
    }


def demo_result(*loads: LoadResult) -> DemoResult:
    return {
        "file_bytes": 90_868_376,
        "processes": 2,
        "sentences": ["A ferry.", "A cake."],
        "similarity": [[1.0, 0.1], [0.1, 1.0]],
        "tolerance": 1e-5,
        "loads": list(loads),
    }


def printed(result: DemoResult) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_difference_within_the_tolerance_is_right() -> None:
    assert wrong_loads(demo_result(load_result("TP", 1e-5))) == ()


def test_a_difference_above_the_tolerance_is_wrong() -> None:
    wrong = load_result("TP", 1.1e-5)
    assert wrong_loads(demo_result(load_result("FSDP2", 0.0), wrong)) == (wrong,)


def test_an_embedding_of_nan_is_wrong() -> None:
    wrong = load_result("TP", math.nan)
    assert wrong_loads(demo_result(wrong)) == (wrong,)


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    text = printed(demo_result(load_result("FSDP2 over TP", 9.3e-8)))
    assert "…" not in text
    row = next(line for line in text.splitlines() if "FSDP2 over TP" in line)
    assert row.split() == ["FSDP2", "over", "TP", "shardferry", *["21.7", "MiB", "25%", "0.13", "60.3", "MiB", "9e-08"]]


def test_the_verdict_names_what_is_wrong() -> None:
    text = printed(demo_result(load_result("FSDP2", 0.0), load_result("TP", 0.5)))
    assert "WRONG: differs by more than 1e-05: TP by shardferry" in text
