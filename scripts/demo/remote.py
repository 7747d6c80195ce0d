"""Demo: two hosts share what they store; one is killed with all it has, every byte is checked.

Each host is an address of the loopback device, with a daemon, a worker, and a store of Mooncake's; there is a master.
Conversations go from one host to the other with every turn, so that each restores what the other stored, and every key
has a copy in both stores. In the middle the first host is killed: worker, daemon, its agent, and its store. The second
one goes on, and at the end its daemon is killed, too: started again, it holds nothing itself, and restores from its
host's store. With `--engine valkey` there is one server, on neither host. Exit status 0 only if no byte was wrong,
something came from the other host before and after the kill, and the self-audit found nothing; 1 otherwise; 2 for wrong
usage.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvoffloadd.testing.program import carry_out, seconds, size
from scripts.demo.hosts import HostsReport, HostsRun
from scripts.harness.program import command_line
from scripts.harness.stores import why_no_mooncake, why_no_valkey

ENGINES: dict[str, Callable[[], str]] = {"mooncake": why_no_mooncake, "valkey": why_no_valkey}


def run(given: argparse.Namespace, folder: Path) -> HostsReport:
    """Everything. Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
    with HostsRun(given, folder) as hosts:
        return hosts.run()


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--engine", choices=tuple(ENGINES), default="mooncake", help="the store (default: %(default)s)")
    add("--turns", type=int, default=120, help="turns of the chat (default: %(default)s)")
    add("--seconds", type=seconds, default=40.0, help="end the chat after so long (default: %(default).0f)")
    add("--memory", type=size, default="256MiB", metavar="SIZE", help="of each daemon (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the chat (default: %(default)s)")
    given = parser.parse_args()
    if given.turns < 8:
        parser.error("--turns: at least 8")
    if reason := ENGINES[given.engine]():
        other = next(name for name, why_not in ENGINES.items() if name != given.engine)
        parser.error(
            f"--engine {given.engine}: {reason}" + ("" if ENGINES[other]() else f"; --engine {other} would do")
        )
    return carry_out("demo-remote", partial(run, given), as_json=given.json)
