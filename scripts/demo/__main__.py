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

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.demo.run import Run
from scripts.demo.worker import KV_HEADS
from scripts.harness.disk import disk_folder
from scripts.harness.program import carry_out, command_line, seconds, size

if TYPE_CHECKING:
    import argparse

    from scripts.demo.report import Report


def run(given: argparse.Namespace, folder: Path) -> Report:
    """Everything. Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
    with disk_folder(None) as disk:
        return Run(given, folder, Path(disk)).run()


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--turns", type=int, default=240, help="turns of the chat (default: %(default)s)")
    add("--seconds", type=seconds, default=60.0, help="end the chat after so long (default: %(default).0f)")
    add("--memory", type=size, default="256MiB", metavar="SIZE", help="the memory tier (default: %(default)s)")
    add("--kv-heads", type=int, default=2, help=f"of the model's {KV_HEADS} KV heads (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the chat (default: %(default)s)")
    given = parser.parse_args()
    if given.turns < 2 or not 1 <= given.kv_heads <= KV_HEADS:
        parser.error(f"--turns: at least 2; --kv-heads: 1 to {KV_HEADS}")
    return carry_out("demo", partial(run, given), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
