"""Stress: many worker processes against one daemon, workers and daemon killed, every loaded byte checked.

Each worker registers KV caches of models in the layouts of kvoffloadd.layout, whose bytes it writes and compares
through the layers' own views, or of random refs (several groups, parts, tensors, paddings); and stores, loads,
reserves, cancels and reconnects at random. Contents are a function of the key, so that what one worker stored another
can check. With --kill-daemon the daemon has a disk tier, too (half of the working set, memory a tenth of it): after
each start it must find again what was there, and everything is audited; with --warm what memory held as well. With
--device cuda KV caches are GPU memory, and many jobs are asked for before it is final. Exit status 0 only if no
byte was wrong, no promise broken, nothing leaked, nothing planted, the disk never over its capacity, the daemon's
self-audit found nothing, and something was checked at all; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.process import memory_folder
from kvoffloadd.testing.program import EXIT_INTERRUPTED, EXIT_USAGE, carry_out, seconds, size
from kvoffloadd.units import format_bytes
from scripts.harness.copies import WAYS
from scripts.harness.models import NAMES
from scripts.harness.planned import NoSuchLayoutError
from scripts.harness.program import add_seed, command_line, seed_of
from scripts.stress.driver import NoDriverError, driver_of
from scripts.stress.namespaces import CHOICES, MIXED, MODELS, geometries
from scripts.stress.options import StressOptions
from scripts.stress.report import StressReport
from scripts.stress.run import StressRun

MEMORY_BYTES_MIN = 4 << 20
"""Less has no room for a few of the largest keys."""
DISK_SHARE = 0.5
DISK_BYTES_MIN = 32 << 20


def main() -> int:
    options, as_json = _arguments()
    try:
        driver = driver_of(options)
    except NoDriverError as error:
        print(f"stress: {error}", file=sys.stderr)
        return EXIT_USAGE
    reports: list[StressReport] = []

    def run(folder: Path) -> StressReport:
        with disk_folder(options.disk_folder) as disk, memory_folder() as memory:
            reports.append(StressRun(options, folder, Path(disk), Path(memory), driver).run())
        return reports[0]

    status = carry_out("stress", run, as_json=as_json)
    return EXIT_INTERRUPTED if status == 0 and reports[0].interrupted else status


def _arguments() -> tuple[StressOptions, bool]:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--seconds", type=seconds, default=30.0, help="how long (default: %(default).0f)")
    add("--workers", type=int, default=4, help="worker processes (default: %(default)s)")
    add("--memory", dest="memory_bytes", type=size, default="128MiB", metavar="SIZE",
        help="the memory tier (default: %(default)s)")  # fmt: skip
    add("--working-set", dest="working_set_bytes", type=size, metavar="SIZE",
        help="what the workers ask for (default: 10 times --memory)")  # fmt: skip
    add("--kill-workers", action="store_true", help="SIGKILL workers at random instants, and start others")
    add("--kill-daemon", action="store_true", help="SIGKILL the daemon at random instants, and start it again")
    add("--warm", action="store_true", help="the memory tier is a file that outlives the daemon")
    add("--disk", dest="disk_folder", type=Path, metavar="PATH",
        help="keep keys in a new folder there, too (default: /var/tmp)")  # fmt: skip
    add(
        "--disk-share", type=_share, metavar="X", help="the disk tier's part of the working set; 0: none (default: 0.5)"
    )
    add("--layout", choices=CHOICES, default=MIXED,
        help="of the workers' KV caches; mixed: all of them, and refs at random (default: %(default)s)")  # fmt: skip
    add("--model", choices=NAMES, default="", metavar="NAME",
        help=f"whose KV caches they are, scaled down: {', '.join(NAMES)} (default: {', '.join(MODELS)})")  # fmt: skip
    add(
        "--plant-corruption", nargs="?", default="", const="loads", choices=("loads", "disk", "refs", "slots"),
        metavar="WHERE",
        help="loads: let the daemon flip bits in loads, which must be noticed (the default); disk: flip bits in files "
        "of the disk tier, which must end as misses; refs, slots: let workers register refs some bytes behind their "
        "place, or one group's in place of another's, which must be noticed",
    )  # fmt: skip
    add("--slow-copies", dest="slow_copies_s", type=seconds, default=0.0, metavar="SECONDS",
        help="let each copy take this much longer")  # fmt: skip
    add("--device", choices=("host", "cuda"), default="host", help="where KV caches lie (default: %(default)s)")
    add("--software-driver", action="store_true", help="without a GPU: on the driver that tests/softcuda is")
    add(
        "--driver-faults", default="", metavar="FAULTS",
        help="what the software driver does wrong in the daemon, such as sticky_after=5000,jitter_ns=100000",
    )  # fmt: skip
    add(
        "--copies",
        choices=tuple(WAYS),
        default="",
        help="how the daemon copies on a GPU: single copies, or runs of rows (default: as its config has it)",
    )
    add_seed(parser)
    add("--socket", type=Path, metavar="PATH", help="use a running daemon; --memory then only scales the working set")
    given = parser.parse_args()
    if given.workers < 1 or given.memory_bytes < MEMORY_BYTES_MIN:
        parser.error(f"--workers: at least 1; --memory: at least {format_bytes(MEMORY_BYTES_MIN)}")
    if given.socket and (
        given.kill_daemon or given.warm or given.plant_corruption or given.slow_copies_s or given.disk_folder
    ):
        parser.error(
            "--kill-daemon, --warm, --plant-corruption, --slow-copies, --disk need a daemon of their own, no --socket"
        )
    if given.device != "cuda" and (given.software_driver or given.driver_faults or given.copies):
        parser.error("--software-driver, --driver-faults and --copies are for --device cuda")
    if given.socket and (given.driver_faults or given.copies):
        parser.error("--driver-faults and --copies need a daemon of their own, no --socket")
    given.working_set_bytes = given.working_set_bytes or 10 * given.memory_bytes
    wants_disk = given.kill_daemon or given.disk_folder or given.plant_corruption == "disk"
    share = (DISK_SHARE if wants_disk else 0.0) if given.disk_share is None else given.disk_share
    if share and given.working_set_bytes * share < DISK_BYTES_MIN:
        parser.error(f"--disk-share: {format_bytes(DISK_BYTES_MIN)} of the working set at least, or 0")
    if not share and (given.disk_folder or given.plant_corruption == "disk"):
        parser.error("--disk-share 0 leaves nothing for --disk and --plant-corruption disk")
    values = vars(given)
    as_json, _ = values.pop("json"), values.pop("disk_share")
    try:
        geometries(0, 1, given.layout, given.model)
    except NoSuchLayoutError as error:
        parser.error(f"--layout: {error}")
    disk_bytes = int(given.working_set_bytes * share) // PAGE_BYTES * PAGE_BYTES
    return StressOptions(**{**values, "disk_bytes": disk_bytes, "seed": seed_of(given, "stress")}), as_json


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no share")
    return value


if __name__ == "__main__":
    sys.exit(main())
