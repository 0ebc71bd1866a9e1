"""Does a load from an object store keep up with its client, and a save, and is reading each byte once worth it?

Three parts, each interleaved in rounds on servers of this machine:

- load: a checkpoint of one file behind nginx, which answers as a public S3 bucket and as a web server; one process
  and four, each reading a quarter. Beside raw obstore (ranged GETs of 8 MiB from as many threads into memory of the
  same size) and, where they are installed, run:ai's streamer and s3fs.
- save: one process to an S3 server in memory, beside raw obstore's multipart upload of the same bytes: one file, and
  four that replace others of the same names, whose parts must have arrived before any is completed.
- twice: four ranks on two "nodes" want a replicated model from a store of 100 MB/s and 20 ms; `read_once` auto, never.

    python -m benchmarks.remote load save twice --rounds 3

Raw rows go to `results/remote.jsonl`, behind the machine they are from, and replace those of the same parts. The table
of ratios is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from benchmarks.machine import machine
from tests.tools import servers
from tests.tools.s3 import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RESULTS = Path(__file__).parent / "results" / "remote.jsonl"
MIB = 1 << 20
TENSOR_BYTES, NUM_TENSORS = 16 * MIB, 48
SAVE_TENSORS = 16
RANGE_BYTES = 8 * MIB
THREADS = 32
PUBLIC = {"AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}


class Call(NamedTuple):
    """One loader or saver in one process; `part` of `parts` is its share."""

    name: str
    url: str
    part: int = 0
    parts: int = 1


def main() -> None:
    """Run the parts asked for, and write what they measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["load", "save", "twice"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.call:
        print(json.dumps(CALLS[given.call](Call(*json.loads(sys.stdin.read())))))
        return
    rows: list[dict[str, object]] = [{"machine": machine()}]
    for part in given.parts:
        for row in {"load": measure_loads, "save": measure_saves, "twice": measure_twice}[part](given.rounds):
            rows.append(row)
            print(json.dumps(row), flush=True)
    earlier = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    kept = [row for row in earlier if row.get("part") not in given.parts]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in (*kept, *rows)))
    summarise(rows)


def measure_loads(rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for every load."""
    with ExitStack() as stack:
        root, home = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        (root / "bucket").mkdir()
        write_checkpoint(root / "bucket" / "model.safetensors", NUM_TENSORS)
        url = stack.enter_context(servers.nginx(root, home))
        os.environ.update(PUBLIC, AWS_ENDPOINT_URL=url, RUNAI_STREAMER_S3_ENDPOINT=url)
        names = ["obstore", "shardferry", "shardferry_http", *peers()]
        for at in range(rounds):
            for processes in (1, 4):
                for name in names[at % len(names) :] + names[: at % len(names)]:
                    if processes > 1 and name in ("runai", "s3fs"):
                        continue  # they have no part of a tensor to ask for
                    where = f"{url}/bucket" if name == "shardferry_http" else "s3://bucket"
                    seconds = run(name, f"{where}/model.safetensors", processes)
                    num_bytes = TENSOR_BYTES * NUM_TENSORS
                    yield {
                        "part": "load",
                        "round": at,
                        "name": name,
                        "processes": processes,
                        "seconds": seconds,
                        "bytes": num_bytes,
                    }


def measure_saves(rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for every save."""
    with tempfile.TemporaryDirectory() as home, servers.s3_server(Path(home)) as endpoint:
        os.environ.update(Bucket.environment(endpoint))
        os.environ.pop("AWS_SKIP_SIGNATURE", None)
        bucket = Bucket(endpoint, "bucket")
        for at in range(rounds):
            for name in ("obstore_put", "shardferry_save", "shardferry_replace")[:: 1 if at % 2 else -1]:
                seconds = run(name, f"s3://{bucket.name}/{secrets.token_hex(4)}", 1)
                yield {
                    "part": "save",
                    "round": at,
                    "name": name,
                    "processes": 1,
                    "seconds": seconds,
                    "bytes": TENSOR_BYTES * SAVE_TENSORS,
                }


def measure_twice(rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for every load by four ranks."""
    with ExitStack() as stack:
        root, home = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        write_checkpoint(root / "model.safetensors", 8)
        proxy = stack.enter_context(servers.proxy(stack.enter_context(servers.nginx(root, home))))
        proxy.latency_s, proxy.rate = 0.02, 100e6
        for at in range(rounds):
            for read_once in ("auto", "never"):
                proxy.reset()
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
                command += ["-m", "benchmarks.remote_twice", f"{proxy.url}/model.safetensors", read_once]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
                done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
                told = json.loads(done.stdout.splitlines()[-1])
                yield {
                    "part": "twice", "round": at, "name": read_once, "processes": 4, **told,
                    "bytes_from_server": proxy.sent, "requests": proxy.requests("GET"),
                }  # fmt: skip


def run(name: str, url: str, processes: int) -> float | None:
    """Return the seconds of the slowest of several processes that do a call at the same time; None if one fails."""
    command = [sys.executable, "-m", "benchmarks.remote", "--call", name]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    for part, process in enumerate(started):
        assert process.stdin is not None
        process.stdin.write(json.dumps(Call(name, url, part, processes)))
        process.stdin.close()
        process.stdin = None
    told = [process.communicate()[0] for process in started]
    return None if any(process.returncode for process in started) else max(float(text.split()[-1]) for text in told)


def write_checkpoint(path: Path, num_tensors: int) -> None:
    """Write one file of equal tensors."""
    from shardferry.format.writer import TensorSpec, lay_out_file

    specs = {f"t{at:03d}": TensorSpec("U8", (TENSOR_BYTES,)) for at in range(num_tensors)}
    layout = lay_out_file(path.name, specs, {})
    block = np.random.default_rng(1).integers(0, 256, TENSOR_BYTES, np.uint8)
    with path.open("wb") as file:
        file.write(layout.header)
        for _ in range(num_tensors):
            file.write(block.data)


def share(call: Call) -> list[str]:
    """Return the tensors of a process."""
    names = [f"t{at:03d}" for at in range(NUM_TENSORS)]
    return names[call.part * NUM_TENSORS // call.parts : (call.part + 1) * NUM_TENSORS // call.parts]


def second_of_two(work: Callable[[], object]) -> float:
    """Return the seconds of the second of two runs: the first pays for imports and fresh connections."""
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
    return seconds


def shardferry_load(call: Call) -> float:
    """Load into tensors made beforehand."""
    import torch

    import shardferry.torch as sf

    state = {name: torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for name in share(call)}
    return second_of_two(lambda: sf.load_state_dict(state, call.url, strict=False))


def obstore_load(call: Call) -> float:
    """The same bytes by ranged GETs, from as many threads as the library has, into memory made beforehand."""
    import obstore
    from obstore.store import from_url

    folder, _, name = call.url.rpartition("/")
    store = from_url(folder, client_options={"allow_http": True})
    count = len(share(call)) * TENSOR_BYTES
    first = call.part * count  # with the header in front: every byte is as good
    out = np.zeros(count, np.uint8)

    def get(at: int) -> None:
        length = min(RANGE_BYTES, count - at)
        chunk = obstore.get_range(store, name, start=first + at, length=length)
        out[at : at + length] = np.frombuffer(memoryview(chunk), np.uint8)

    def work() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(get, range(0, count, RANGE_BYTES)))

    return second_of_two(work)


def runai_load(call: Call) -> float:
    """run:ai's streamer; its tensors are views of a buffer that is used again, so they are copied."""
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "RUNAI_STREAMER_CONCURRENCY": str(THREADS),
    }

    def work() -> None:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(call.url)
            held = {name: tensor.clone() for name, tensor in streamer.get_tensors()}
        assert len(held) == NUM_TENSORS

    return second_of_two(work)


def s3fs_load(call: Call) -> float:
    """The whole file by ranges of the same size, as many at a time."""
    import s3fs

    files = s3fs.S3FileSystem(anon=True, endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    path = call.url.removeprefix("s3://")
    size = NUM_TENSORS * TENSOR_BYTES
    starts = list(range(0, size, RANGE_BYTES))

    def work() -> None:
        out = np.zeros(size, np.uint8)
        for at in range(0, len(starts), THREADS):
            here = starts[at : at + THREADS]
            found = files.cat_ranges([path] * len(here), here, [start + RANGE_BYTES for start in here])
            for start, data in zip(here, found, strict=True):
                out[start : start + len(data)] = np.frombuffer(data, np.uint8)[: size - start]

    return second_of_two(work)


def shardferry_save(call: Call) -> float:
    """Save one file."""
    import torch

    import shardferry.torch as sf

    state = {f"t{at}": torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for at in range(SAVE_TENSORS)}
    return second_of_two(lambda: sf.save_state_dict(state, call.url, on_existing="replace"))


def shardferry_replace(call: Call) -> float:
    """Save four files, the second time over those of the first."""
    import torch

    import shardferry.torch as sf

    state = {f"t{at}": torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for at in range(SAVE_TENSORS)}
    size = TENSOR_BYTES * SAVE_TENSORS // 4
    return second_of_two(lambda: sf.save_state_dict(state, call.url, max_shard_size=size, on_existing="replace"))


def obstore_save(call: Call) -> float:
    """Upload as many bytes in parts of the same size, as many at a time."""
    import obstore
    from obstore.store import from_url

    store = from_url(call.url, client_options={"allow_http": True})
    data = bytes(TENSOR_BYTES * SAVE_TENSORS)
    return second_of_two(
        lambda: obstore.put(store, "x", data, use_multipart=True, chunk_size=RANGE_BYTES, max_concurrency=12)
    )


CALLS = {
    "shardferry": shardferry_load,
    "shardferry_http": shardferry_load,
    "obstore": obstore_load,
    "runai": runai_load,
    "s3fs": s3fs_load,
    "shardferry_save": shardferry_save,
    "shardferry_replace": shardferry_replace,
    "obstore_put": obstore_save,
}


def peers() -> list[str]:
    """Return the peers that are installed."""
    from importlib.util import find_spec

    return [name for name, module in (("runai", "runai_model_streamer"), ("s3fs", "s3fs")) if find_spec(module)]


def summarise(rows: list[dict[str, object]]) -> None:
    """Print the median rate of everything, and its ratio to the first of its part inside each round."""
    seen: dict[tuple[object, ...], list[float]] = {}
    for row in rows[1:]:
        if row["seconds"] is None:
            print(f"{row['part']} {row['name']} failed")
            continue
        seen.setdefault((row["part"], row["processes"], row["name"]), []).append(float(str(row["seconds"])))
    for (part, processes, name), seconds in seen.items():
        base = seen[part, processes, {"load": "obstore", "save": "obstore_put", "twice": "never"}[str(part)]]
        ratio = statistics.median(b / s for b, s in zip(base, seconds, strict=False))
        print(f"{part:6} {processes} {name:16} {statistics.median(seconds):7.2f} s  {ratio:5.2f} x")


if __name__ == "__main__":
    main()
