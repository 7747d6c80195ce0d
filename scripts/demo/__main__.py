#!/usr/bin/env python3
"""Demo: two workers chat through one daemon with little memory and a disk; both are killed, every byte is checked.

Starts a daemon on a private socket and two worker processes with the KV cache of gpt-oss-20b, its heads scaled down
(12 layers of full and 12 of sliding attention on 12 slots), or of another model, in a layout of kvoffloadd.layout:
blocks are written and compared through the layers' views. Conversations go from one worker to the other with every
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
from scripts.demo.worker import WHOLE, geometry_of
from scripts.harness.disk import disk_folder
from scripts.harness.models import NAMES, named
from scripts.harness.planned import LAYOUTS, NoSuchLayoutError
from scripts.harness.program import carry_out, command_line, seconds, size

if TYPE_CHECKING:
    import argparse

    from scripts.demo.report import Report

WITH_STATES = "qwen3-next-80b-a3b"
FEW_HEADS = 2


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
    add("--model", choices=NAMES, metavar="NAME", help="whose KV cache, such as llama-4-scout, scaled down (default: "
        f"{WHOLE}, or {WITH_STATES} where the layout is for states)")  # fmt: skip
    add("--layout", choices=LAYOUTS, default="cross-layer", help="of the KV cache (default: %(default)s)")
    add("--kv-heads", type=int, help=f"of the model's KV heads (default: {FEW_HEADS}, if it has so many)")
    add("--seed", type=int, default=0, help="of the chat (default: %(default)s)")
    given = parser.parse_args()
    given.model = given.model or (WITH_STATES if given.layout == "packed-pages" else WHOLE)
    most = named(given.model).kv_heads
    given.kv_heads = min(FEW_HEADS, most) if given.kv_heads is None else given.kv_heads
    if given.turns < 2 or not 1 <= given.kv_heads <= most:
        parser.error(f"--turns: at least 2; --kv-heads: 1 to {most}")
    try:
        geometry_of(given.model, given.layout, given.kv_heads)
    except NoSuchLayoutError as error:
        parser.error(f"--layout: {error}")
    return carry_out("demo", partial(run, given), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
