#!/usr/bin/env python3
"""Demo: two workers chat through one daemon with little memory and a disk; both are killed, every byte is checked.

Starts a daemon on a private socket and two worker processes with the KV cache of gpt-oss-20b, its heads scaled down
(12 layers of full and 12 of sliding attention on 12 slots). Conversations go from one worker to the other with every
turn, so that each restores what the other stored. In the middle one worker is killed (SIGKILL). At the end the daemon
is, and started again: its memory is gone, and the last turns of the conversations are restored from disk. Exit status 0
only if no byte was wrong, something came from disk after the restart, nothing leaked and the daemon's self-audit found
nothing; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.units import parse_bytes
from scripts.demo.report import print_report
from scripts.demo.run import Options, Run
from scripts.demo.worker import KV_HEADS
from scripts.harness.disk import disk_folder
from scripts.harness.output import print_json
from scripts.harness.process import DaemonError, obey_signals, private_folder

EXIT_BAD, EXIT_INTERRUPTED = 1, 130


def main() -> int:
    """Runs it; returns the exit status."""
    options, as_json = _arguments()
    obey_signals()
    try:
        with private_folder() as folder, disk_folder(None) as disk:
            report = Run(options, Path(folder), Path(disk)).run()
    except (DaemonError, KvOffloadError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_BAD
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report)
    return 0 if report.is_good else EXIT_BAD


def _arguments() -> tuple[Options, bool]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], epilog=__doc__.split("\n", 1)[1])
    add = parser.add_argument
    add("--turns", type=int, default=240, help="turns of the chat (default: %(default)s)")
    add("--seconds", type=float, default=60.0, help="end the chat after so long (default: %(default).0f)")
    add("--memory", type=_size, default="256MiB", metavar="SIZE", help="the memory tier (default: %(default)s)")
    add("--kv-heads", type=int, default=2, help=f"of the model's {KV_HEADS} KV heads (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the chat (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object on standard output in place of the table")
    given = parser.parse_args()
    if given.turns < 2 or not 1 <= given.kv_heads <= KV_HEADS or not given.seconds > 0:
        parser.error(f"--turns: at least 2; --kv-heads: 1 to {KV_HEADS}; --seconds: above 0")
    return Options(given.seconds, given.turns, given.memory, given.kv_heads, given.seed), given.json


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{text}" {error}') from None


if __name__ == "__main__":
    sys.exit(main())
