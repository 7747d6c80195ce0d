"""What a layout of the KV cache buys: the same model and the same bytes in each, against memcpy by one thread.

Jobs of about as many bytes (128 MiB by default), which store and load blocks of all the model's groups, at scattered
block ids; layers and blocks have the model's true sizes. On `host`, and on a software driver whose calls take some time
for each copy that they submit (`--submit-ns`), as a real one's do; what such a driver copies, it copies by memcpy.
A round has a store, a load and a memcpy of each layout, each with the daemon at rest. `descriptors` and `copies` (the
driver's operations, neighbours merged) are the daemon's own counts. Times are the client's, from `store` or `load` to
the end of `wait`; ratios are medians over the rounds. `submission_ms` is copies times `--submit-ns`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.bench.memory import SETS, Memcpy
from kvoffloadd.bench.rounds import Samples, in_rounds
from kvoffloadd.client import Client, NamespaceSpec
from kvoffloadd.client.memory.tensor import CanonicalTensor
from kvoffloadd.planner import Layout
from kvoffloadd.testing.figures import KEY_BYTES, median_ratio, p50, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import private_folder
from kvoffloadd.testing.program import size
from kvoffloadd.testing.workload import WAIT_S, Workload
from scripts.harness.arrangement import Arrangement
from scripts.harness.daemon import Daemon
from scripts.harness.figures import at_most, judged, print_bounds
from scripts.harness.models import NAMES, named
from scripts.harness.places import GpuLine, HostPlace
from scripts.harness.planned import planned_geometries, possible
from scripts.harness.program import benchmark_line, show_result
from tests import softcuda

MODELS = ("gpt-oss-20b", "qwen3-next-80b-a3b")
"""Attention alone on small blocks; states, which make blocks long."""
COMPARED = ("by-layer", "cross-layer", "packed-pages", "packed-rows")
"""Of the harness's layouts."""
SLAB_BYTES, SLABS = 64 << 20, 8
"""The arena's slabs in addition to those that the jobs fill, since each size of payloads has its own."""
HOST, CUDA = "host", "software driver"
DIRECTIONS = ("store", "load")


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """A model in one layout, at its true sizes, on one rank."""

    model: str
    layout: str

    @property
    def planned(self) -> Layout:
        """The planner's."""
        (geometry,) = planned_geometries(self.model, named(self.model), 0, layouts=(self.layout,))
        return possible(geometry.of)[0][self.layout]

    def keys_in(self, job_bytes: int) -> int:
        """Keys of each group in a job of about that many bytes."""
        return max(1, job_bytes // sum(self.planned.payloads))

    def arrangement(self, keys: int) -> Arrangement:
        """Arranges blocks for this many keys of each group."""
        (geometry,) = planned_geometries(self.model, named(self.model), 0, layouts=(self.layout,))
        return geometry.arrange_blocks(0, keys * self.planned.num_groups, self.layout)


def cases_of(model: str) -> list[LayoutCase]:
    """Returns a case for each layout that the model can have."""
    geometries = planned_geometries(model, named(model), 0)
    possible_names = {layout for geometry in geometries for layout in geometry.layouts}
    return [LayoutCase(model, layout) for layout in COMPARED if layout in possible_names]


class LayoutWorkload(Workload):
    """A worker whose KV cache is that of a case."""

    def __init__(self, socket: Path, case: LayoutCase, job_bytes: int, line: GpuLine | None) -> None:
        self.case = case
        keys = case.keys_in(job_bytes)
        arrangement = case.arrangement(keys)
        rng = np.random.default_rng(1)
        self._place = line.place(arrangement.layouts, rng, "") if line else HostPlace(arrangement.layouts, "kv_cache")
        for rows in self._place.rows:
            rows[:] = 1  # the kernel provides the pages now
        self._place.publish()
        namespace = NamespaceSpec(model=case.model, layout=case.layout, key_bytes=KEY_BYTES)
        super().__init__(
            Client(socket, namespace=namespace, deadline_s=WAIT_S),
            in_order(self._place.tensors, arrangement),
            keys,
            scattered=True,
            groups=arrangement.groups,
            timelines=[line.timeline] if line else [],
        )

    def counted(self, daemon: Daemon, direction: str) -> dict[str, int]:
        """Runs one more job, and returns what the daemon counts of it."""
        before = daemon.status()["transfers"][direction]
        self.store() if direction == "store" else self.load()
        after = daemon.status()["transfers"][direction]
        return {name: after[name] - before[name] for name in ("descriptors", "copies", "bytes", "keys")}


def in_order(tensors: Sequence[CanonicalTensor], arrangement: Arrangement) -> list[CanonicalTensor]:
    """Returns the tensors in the order in which they are registered."""
    return [tensors[at] for at in arrangement.order]


def measure(benches: Sequence[LayoutWorkload], rounds: int) -> list[Samples[float]]:
    """Seconds of each layout's jobs, by round; layouts are interleaved."""
    memcpy = Memcpy(max(bench.bytes for bench in benches))

    def measure_round() -> dict[str, float]:
        found = {}
        for bench in benches:
            bench.drain()
            found[f"{bench.case.layout} store"] = bench.store()[0]
            bench.drain()
            found[f"{bench.case.layout} load"] = bench.load()[0]
            found[f"{bench.case.layout} memcpy"] = memcpy.seconds(bench.bytes)
        return found

    samples = in_rounds(rounds, measure_round)
    return [{what: samples[f"{bench.case.layout} {what}"] for what in (*DIRECTIONS, "memcpy")} for bench in benches]


@contextlib.contextmanager
def served(
    cases: Sequence[LayoutCase], given: argparse.Namespace, device: str
) -> Iterator[tuple[Daemon, list[LayoutWorkload]]]:
    """A daemon, and a worker for each case."""
    line = None
    environment: Mapping[str, str] = {}
    if device == CUDA:
        softcuda.load()
        line = GpuLine()
        environment = softcuda.environment(f"submit_ns={given.submit_ns}")
    settings = {"memory.slab_bytes": str(SLAB_BYTES)}
    with (
        private_folder() as folder,
        Daemon(Path(folder), SLABS * SLAB_BYTES + SETS * given.bytes, settings, environment=environment) as daemon,
        contextlib.ExitStack() as stack,
    ):
        benches = [LayoutWorkload(daemon.socket, case, given.bytes, line) for case in cases]
        for bench in benches:
            stack.callback(bench.client.close, WAIT_S)
        yield daemon, benches


def run_model(model: str, given: argparse.Namespace, devices: Sequence[str]) -> dict[str, Any]:
    """All layouts of a model on these devices."""
    cases = cases_of(model)
    layouts = [_described(case) for case in cases]
    for device in devices:
        with served(cases, given, device) as (daemon, benches):
            samples = measure(benches, given.rounds)
            for found, bench, own in zip(layouts, benches, samples, strict=True):
                found["job_bytes"] = bench.bytes
                found["devices"][device] = {
                    direction: _figures(
                        bench, daemon, direction, own, benches[0].bytes, samples[0], given.submit_ns * (device == CUDA)
                    )
                    for direction in DIRECTIONS
                }
    return {"model": model, "layouts": layouts}


def _described(case: LayoutCase) -> dict[str, Any]:
    planned = case.planned
    return {
        "layout": case.layout,
        "block_tokens": planned.block_tokens,
        "payloads": list(planned.payloads),
        "descriptors": list(planned.descriptors),
        "devices": {},
    }


def _figures(
    bench: LayoutWorkload,
    daemon: Daemon,
    direction: str,
    own: Samples[float],
    first_bytes: int,
    first: Samples[float],
    submit_ns: int,
) -> dict[str, Any]:
    """`first`: samples of the first layout, a tensor a layer: `time_to_by_layer` is against it, byte for byte."""
    counted = bench.counted(daemon, direction)
    return {
        "descriptors": counted["descriptors"],
        "copies": counted["copies"],
        "unplanned_descriptors": abs(
            counted["descriptors"] - bench.case.planned.descriptors_of([bench.keys] * bench.case.planned.num_groups)
        ),
        "ms": round(p50(own[direction]) * 1e3, 2),
        "submission_ms": round(counted["copies"] * submit_ns / 1e6, 2),
        "gb_per_s": round(bench.bytes / p50(own[direction]) / 1e9, 2),
        "memcpy_gb_per_s": round(bench.bytes / p50(own["memcpy"]) / 1e9, 2),
        "ratio_to_limit": round(median_ratio(own["memcpy"], own[direction]), 3),
        "time_to_by_layer": round(median_ratio(own[direction], first[direction]) * first_bytes / bench.bytes, 2),
    }


def summary(models: list[dict[str, Any]], given: argparse.Namespace, left_out: list[str]) -> dict[str, Any]:
    """All figures, and that descriptors are as planned: the one bound, whatever the machine."""
    figures = [
        figure
        for model in models
        for layout in model["layouts"]
        for found in layout["devices"].values()
        for figure in found.values()
    ]
    unplanned = sum(figure["unplanned_descriptors"] for figure in figures)
    bounds = [at_most("descriptors that were not planned, or not counted", unplanned, 0)]
    least = min(figure["ratio_to_limit"] for figure in figures)
    result = {"submit_ns": given.submit_ns, "models": models, "left_out": left_out, "ratio_to_limit": least}
    return judged(result, bounds)


def show(result: dict[str, Any]) -> None:
    for model in result["models"]:
        for device in (HOST, CUDA):
            rows = [
                _row(layout, layout["devices"][device]) for layout in model["layouts"] if device in layout["devices"]
            ]
            if rows:
                cost = f", {result['submit_ns']:,} ns a copy" if device == CUDA else ""
                print_grid(f"{model['model']}, {device}{cost}: ratio to memcpy (GB/s)", COLUMNS, rows)
                print()
    for text in result["left_out"]:
        print(f"left out: {text}")
    print_bounds(result)


COLUMNS = ("layout", "a block", "copies", "submit ms", "store", "load", "time")
"""`a block`: descriptors of a block of a group; `time`: of a store and of a load, where by-layer takes 1."""


def _row(layout: dict[str, Any], found: dict[str, Any]) -> tuple[str, ...]:
    store, load = found["store"], found["load"]
    each = layout["descriptors"]
    a_block = f"{min(each)}" if min(each) == max(each) else f"{min(each)}-{max(each)}"
    return (
        layout["layout"],
        a_block,
        f"{load['copies']:,}",
        f"{load['submission_ms']:,.1f}",
        *(f"{one['ratio_to_limit']:.2f} ({one['gb_per_s']:.1f})" for one in (store, load)),
        f"{store['time_to_by_layer']:.2f}, {load['time_to_by_layer']:.2f}",
    )


def main() -> int:
    parser = benchmark_line(__doc__)
    add = parser.add_argument
    add("--bytes", type=size, default="128MiB", help="of one job, about (default: %(default)s)")
    add("--rounds", type=int, default=15, help="interleaved rounds (default: %(default)s)")
    add("--submit-ns", type=int, default=2000, help="what submitting a copy takes (default: %(default)s)")
    add("--models", nargs="*", choices=NAMES, default=MODELS, metavar="NAME", help="default: %(default)s")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.bytes) < 1 or arguments.submit_ns < 0:
        parser.error("--bytes and --rounds are at least 1, --submit-ns at least 0")
    left_out = []
    devices = [HOST]
    try:
        softcuda.build()
        devices.append(CUDA)
    except softcuda.SoftCudaError as error:
        left_out.append(f"{CUDA}: {error}")
    models = []
    with ProgressBar("bench_layouts", len(arguments.models)) as live:
        for number, name in enumerate(arguments.models):
            live.show(number, name)
            models.append(run_model(name, arguments, devices))
    return show_result(summary(models, arguments, left_out), arguments, show)
