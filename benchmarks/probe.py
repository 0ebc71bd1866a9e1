"""Does a probe tell at which span reading a part of a file beats reading all of it?

    python -m benchmarks.probe [--cases local fuse http] [--folder FOLDER]

For a local disk, a FUSE mount with 5 ms and 200 MB/s, and a web server with 20 ms and 200 MB/s: an eighth of a file of
512 MiB is read in spans of growing size, and all of it, with a cold page cache; where both take as long is the
break-even span. The probe runs in turns with that, three times, and what it predicts is divided by the median. FUSE
needs root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from benchmarks.machine import machine
from benchmarks.measure import drop_from_page_cache
from safetensors.numpy import save_file
from tests.tools.mounts import slow_mounts
from tests.tools.slow_http import slow_web

from shardferry.execute.open import open_checkpoint
from shardferry.execute.probing import probe_storage
from shardferry.storage.location import locate
from shardferry.storage.placement import place_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.storage.base import ReadableFile

RESULTS = Path(__file__).parent / "results" / "probe.jsonl"
FILE = "model.safetensors"
SIZE = 512 << 20
FRACTION = 1 / 8
WHOLE_SPAN = 4 << 20
SPANS = [1 << power for power in range(12, 21)]
# Slow sizes are stopped and scaled up.
MAX_SECONDS = 2.5
STREAMS = {"local": (1, 2, 4), "fuse": (1, 2, 4, 16), "http": (4, 16, 32)}
ROUNDS = 3


class Case(NamedTuple):
    """A storage: where the file is, and the file on this machine whose pages must go, if there is one."""

    path: str
    cached: Path | None


def main() -> None:
    """Measure each case, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--folder", type=Path, help="make the file here (default: a temporary folder)")
    arguments = parser.parse_args()
    records = [dict[str, object](machine())]
    with tempfile.TemporaryDirectory(prefix="shardferry-probe-", dir=arguments.folder) as made:
        noise = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
        save_file({"weight": np.tile(noise, SIZE >> 20)}, Path(made) / FILE)
        for name in arguments.cases:
            with _case(name, Path(made)) as case:
                records += [_compare(name, case, streams) for streams in STREAMS[name]]
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in records))


@contextmanager
def _case(name: str, folder: Path) -> Iterator[Case]:
    if name == "fuse":
        with slow_mounts(folder, latency_ms=5, rate_mb=200) as mounts:
            yield Case(str(mounts.paths[0]), mounts.paths[0] / FILE)
    elif name == "http":
        with slow_web(folder, latency_ms=20, rate_mb=200) as url:
            yield Case(f"{url}/{FILE}", None)
    else:
        yield Case(str(folder), folder / FILE)


def _compare(name: str, case: Case, streams: int) -> dict[str, object]:
    """Measure and probe in turns.

    A virtual disk that was idle gives more for a while, so the file is read once before either.
    """
    measured, probed, bandwidths = [], [], []
    for _ in range(ROUNDS):
        break_even, bandwidth = _break_even(case, streams)
        measured.append(break_even)
        bandwidths.append(bandwidth)
        _timed(case, streams, WHOLE_SPAN, WHOLE_SPAN)
        _drop(case)
        result = probe_storage(case.path, streams=streams)
        probed.append(math.nan if result.fit is None else result.fit.break_even_bytes(FRACTION))
        print(
            f"{name}, {streams} in flight: break-even {break_even / 1024:.1f} KiB at {bandwidth / 1e6:.0f} MB/s; probe "
            f"{probed[-1] / 1024:.1f} KiB at {result.model.node_bandwidth / 1e6:.0f} MB/s in "
            f"{result.measurement.seconds:.2f} s, {result.measurement.read_bytes / 1e6:.0f} MB; "
            f"{result.why_preset or (result.fit and f'{result.fit.kind}, off by {result.fit.max_error:.0%}')}",
            flush=True,
        )
    truth = statistics.median(measured)
    ratios = [round(guess / truth, 2) for guess in probed]
    print(f"{name}, {streams} in flight: probe / measured {', '.join(map(str, ratios))}", flush=True)
    return {
        "case": name,
        "streams": streams,
        "break_even_bytes": [round(span) for span in measured],
        "bandwidth": [round(rate) for rate in bandwidths],
        "probed_bytes": [round(span) for span in probed],
        "probed_over_median": ratios,
    }


def _break_even(case: Case, streams: int) -> tuple[float, float]:
    """Return the span at which a part takes as long as all of it, and the bytes per second of all of it."""
    _, whole = (_timed(case, streams, WHOLE_SPAN, WHOLE_SPAN) for _ in range(2))
    before: tuple[int, float] | None = None
    for span in SPANS:
        ratio = _timed(case, streams, span, round(span / FRACTION)) / whole
        if ratio < 1:
            # Below the smallest span: a request costs what it costs, so the time goes with one over the span.
            low, high = before or (span / 2, 2 * ratio)
            return low * (span / low) ** (math.log(high) / math.log(high / ratio)), SIZE / whole
        before = span, ratio
    raise RuntimeError("reading a part never beat reading all of it")


def _timed(case: Case, streams: int, span: int, stride: int) -> float:
    """Return the seconds for reads of `span` bytes every `stride` bytes, from all streams."""
    store = locate(case.path).open_store(open_checkpoint(case.path).files)
    # After the header is read: the kernel's read-ahead behind it goes on along with one who reads in order, and gave
    # one stream 2.2 instead of 0.9 GB/s.
    _drop(case)
    lock, starts = threading.Lock(), iter(range(0, SIZE - stride + 1, stride))
    done = 0
    begin = time.perf_counter()

    def read(file: ReadableFile, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        nonlocal done
        while time.perf_counter() - begin < MAX_SECONDS:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            file.read_into(out, start, lambda *_: None)
            with lock:
                done += 1

    with store.open(FILE) as file, ThreadPoolExecutor(streams) as pool:
        for work in [pool.submit(read, file, place_bytes(span, 0)) for _ in range(streams)]:
            work.result()
    return (time.perf_counter() - begin) * (SIZE // stride) / done


def _drop(case: Case) -> None:
    if case.cached is not None:
        os.sync()
        drop_from_page_cache([case.cached])


if __name__ == "__main__":
    main()
