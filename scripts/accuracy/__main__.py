"""Accuracy check: a tiny model answers questions from KV that a daemon had, in every layout, as if it had computed it.

Trains a hybrid model (full attention, windows, states) within seconds to a task that needs all three, computes prompts,
stores their KV cache in a separate daemon, and answers the same questions from what it loads: out of memory, and,
after a restart of the daemon, from disk. Then it loads wrong blocks on purpose, which must show. Exit status 0 only if
accuracy is 95 % at least, every answer is equal to the recomputed one, and every wrong block was noticed; 1 otherwise;
2 for wrong usage. Needs torch.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from kvoffloadd.errors import UsageError
from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.program import carry_out
from scripts.accuracy.report import AccuracyReport
from scripts.harness.program import command_line


def run(given: argparse.Namespace, folder: Path) -> AccuracyReport:
    """Everything. Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
    if find_spec("torch") is None:
        raise UsageError("torch is not installed: the model needs it")
    from scripts.accuracy.run import AccuracyRun  # loads torch, which takes seconds

    with disk_folder(None) as disk:
        return AccuracyRun(given, folder, Path(disk)).run()


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--prompts", type=int, default=32, help="an even number, with 12 questions each (default: %(default)s)")
    add("--seed", type=int, default=0, help="of model, training and prompts (default: %(default)s)")
    given = parser.parse_args()
    if given.prompts < 2 or given.prompts % 2:
        parser.error("--prompts: an even number, 2 at least")
    return carry_out("accuracy", partial(run, given), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
