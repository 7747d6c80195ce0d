"""Soak: two hosts that share a real store, everything on them killed at random, every loaded byte checked.

Each host is a network namespace with a daemon and workers (those of `stress`), which store and load the same keys as
the other host's; without root, an address of the loopback device, whose links can't be cut. The store is Mooncake's,
with a master and a store on each host, or Valkey. At random instants workers, daemons, their agents, stores and the
master are killed, stopped for a while or for good, links cut or made slow, namespaces cleared: the seed sets when. The
first host keeps its memory tier over a kill and has a disk, which for a while can record no clear; the second one has
neither. A vandal damages, replaces and removes the small objects that hosts agree through, in some namespaces. Others
are watched: what a clear has ended must not come back, on no host, also on one that was down meanwhile.

Exit status 0 only if no byte was wrong, nothing was served after a clear that was stored before, no promise broken, no
daemon ended by itself, nothing leaked (descriptors, mappings, leases, slots, processes, memory), no audit found
anything, and something came from the store; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.process import DaemonError, memory_folder
from kvoffloadd.testing.program import carry_out, seconds, size
from scripts.harness.program import add_seed, command_line, seed_of
from scripts.harness.stores import why_no_mooncake, why_no_valkey
from scripts.soak.options import SoakOptions
from scripts.soak.report import SoakReport
from scripts.soak.run import SoakRun

ENGINES: dict[str, Callable[[], str]] = {"mooncake": why_no_mooncake, "valkey": why_no_valkey}
STORE_TIMES, WORKING_SET_TIMES = 6, 3


def main() -> int:
    options, as_json = _arguments()

    def run(folder: Path) -> SoakReport:
        with disk_folder(None) as disk, memory_folder() as memory:
            try:
                return SoakRun(options, folder, Path(disk), Path(memory)).run()
            except TimeoutError as error:
                raise DaemonError(str(error)) from error

    return carry_out("soak", run, as_json=as_json)


def _arguments() -> tuple[SoakOptions, bool]:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--seconds", type=seconds, default=1200.0, help="how long (default: %(default).0f)")
    add("--engine", choices=tuple(ENGINES), default="mooncake", help="the store (default: %(default)s)")
    add("--workers", type=int, default=2, help="worker processes of each host (default: %(default)s)")
    add("--memory", dest="memory_bytes", type=size, default="64MiB", metavar="SIZE",
        help=f"of each daemon (default: %(default)s); the store has {STORE_TIMES} times as much, workers ask for "
        f"{WORKING_SET_TIMES} times as much")  # fmt: skip
    add_seed(parser)
    given = parser.parse_args()
    if given.workers < 1 or given.memory_bytes < 64 << 20:
        parser.error("--workers: at least 1; --memory: at least 64MiB")
    if reason := ENGINES[given.engine]():
        parser.error(f"--engine {given.engine}: {reason}")
    values = vars(given)
    as_json = values.pop("json")
    sizes = {
        "store_bytes": STORE_TIMES * given.memory_bytes,
        "working_set_bytes": WORKING_SET_TIMES * given.memory_bytes,
    }
    return SoakOptions(**{**values, **sizes, "seed": seed_of(given, "soak")}), as_json


if __name__ == "__main__":
    sys.exit(main())
