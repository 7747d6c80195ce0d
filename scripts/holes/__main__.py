"""Holes: attackers punch holes into memory that they have registered, next to bystanders whose every byte is checked.

An attacker punches pages out of its memory, cuts the file off and lets it grow, and fills it again, while its stores
and loads run and between them. Bystanders do nothing of that: they store and load in their own namespaces, and in one
that all share. A key that misses, or a load that failed, excuses its blocks; a hit with wrong bytes does not, nor does
any byte that changes in a block that no load names. Of keys that an attacker has stored every byte must be right or 0.
The report also has what a check that ignores states would count. With --kill-workers and --kill-daemon processes are
killed at random instants; of daemons half keep their memory tier, all their disk. If bytes are wrong, files in
--evidence have each wrong block, what it was used for, and the calls before. Exit status 0 only if no byte was wrong,
no promise broken, nothing leaked, no audit found anything, and something was checked; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.process import memory_folder
from kvoffloadd.testing.program import EXIT_INTERRUPTED, carry_out, seconds, size
from kvoffloadd.units import format_bytes
from scripts.harness.program import add_seed, command_line, seed_of
from scripts.holes.options import HolesOptions
from scripts.holes.report import HolesReport
from scripts.holes.run import HolesRun

MEMORY_BYTES_MIN = 16 << 20


def main() -> int:
    options, as_json = _arguments()
    reports: list[HolesReport] = []

    def run(folder: Path) -> HolesReport:
        with disk_folder(options.disk_folder) as disk, memory_folder() as memory:
            reports.append(HolesRun(options, folder, Path(disk), Path(memory)).run())
        return reports[0]

    status = carry_out("holes", run, as_json=as_json)
    return EXIT_INTERRUPTED if status == 0 and reports[0].interrupted else status


def _arguments() -> tuple[HolesOptions, bool]:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--seconds", type=seconds, default=60.0, help="how long (default: %(default).0f)")
    add("--bystanders", type=int, default=2, help="processes that are checked (default: %(default)s)")
    add("--attackers", type=int, default=2, help="processes that punch holes (default: %(default)s)")
    add("--memory", dest="memory_bytes", type=size, default="32MiB", metavar="SIZE",
        help="the memory tier; the disk has 3 times, what workers ask for 5 times as much (%(default)s)")  # fmt: skip
    add("--disk", dest="disk_folder", type=Path, metavar="PATH", help="where the disk tier is (default: /var/tmp)")
    add("--kill-workers", action="store_true", help="SIGKILL bystanders and attackers, and start others")
    add("--kill-daemon", action="store_true", help="SIGKILL the daemon, and start it again, with its memory or without")
    add("--plant-corruption", action="store_true", help="let the daemon flip bits in loads: this must be noticed")
    add("--pause", dest="pause_s", type=float, default=0.0, metavar="SECONDS",
        help="let each worker pause after each step (default: 0)")  # fmt: skip
    add("--evidence", type=Path, metavar="PATH", help="a folder for what is wrong (default: a new name in /tmp)")
    add_seed(parser)
    given = parser.parse_args()
    if given.bystanders < 1 or given.attackers < 0 or given.pause_s < 0:
        parser.error("--bystanders: at least 1; --attackers and --pause: at least 0")
    if given.memory_bytes < MEMORY_BYTES_MIN:
        parser.error(f"--memory: at least {format_bytes(MEMORY_BYTES_MIN)}")
    values = vars(given)
    as_json = values.pop("json")
    seed = seed_of(given, "holes")
    evidence = given.evidence or Path(tempfile.gettempdir()) / f"kvo-holes-{seed}"
    return HolesOptions(**{**values, "seed": seed, "evidence": evidence}), as_json


if __name__ == "__main__":
    sys.exit(main())
