"""kvoffloadd, LMCache, vLLM's own tiering and Mooncake Store: the same work through each, alternately.

Each round runs every system alone, one after the other, and another one first: round trips, lookups of 1k to 128k
tokens, stores and loads, disk writes and reads, restarts. Then each is asked once what it does when memory is full, and
with a flipped bit. `make bench-peers` makes the environments first and writes docs/benchmarks/peers.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.output import ProgressBar, print_json
from kvoffloadd.testing.process import DaemonError, obey_signals
from kvoffloadd.testing.program import EXIT_BAD, EXIT_INTERRUPTED
from scripts.peers.cases import Notes, RunPlan, find_out, in_short, run_round
from scripts.peers.figures import LOOKUP_TOKENS, Samples
from scripts.peers.page import page
from scripts.peers.peers import PEERS, Peer, PeerError, PeerSession
from scripts.peers.report import machine, result_of, show
from scripts.peers.system import NotOfferedError


def order(peers: Sequence[Peer], number: int) -> list[Peer]:
    """Returns the order of a round: another peer is first each time."""
    at = number % len(peers)
    return [*peers[at:], *peers[:at]]


def run(peers: Sequence[Peer], plan: RunPlan, rounds: int, live: ProgressBar) -> dict[str, Any]:
    """All rounds, then what is found out once."""
    samples: dict[str, Samples] = {peer.name: {} for peer in peers}
    notes = {peer.name: Notes() for peer in peers}
    done = 0
    for number in range(rounds):
        for peer in order(peers, number):
            live.show(done, f"round {number + 1} of {rounds}: {peer.title}")
            run_round(peer, plan, samples[peer.name], notes[peer.name])
            done += 1
    facts = {}
    for peer in peers:
        live.show(done, f"what it does: {peer.title}")
        facts[peer.name] = find_out(peer, plan)
        done += 1
    return {
        "samples": samples,
        "notes": {name: one.said for name, one in notes.items()},
        "facts": facts,
        "versions": {peer.name: versions(peer, plan) for peer in peers},
    }


def versions(peer: Peer, plan: RunPlan) -> dict[str, str]:
    """Returns the versions as its own Python has them."""
    try:
        with PeerSession(peer, plan.thin, plan.sizes(1), disk=None, on_disk=False) as session:
            found: dict[str, str] = session.ask("versions")
            return found
    except (DaemonError, PeerError, NotOfferedError) as error:
        return {"?": in_short(error)}


def command_line() -> argparse.ArgumentParser:
    """`--quick` is for trying it out: its figures mean little."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object on standard output in place of tables")
    add("--write", type=Path, metavar="FILE", help="the page, as Markdown")
    add("--rounds", type=int, default=7, help="of all systems (default: %(default)s)")
    add("--quick", action="store_true", help="one round with short prompts")
    add("--only", nargs="+", choices=[peer.name for peer in PEERS], metavar="NAME",
        help=f"some of {', '.join(peer.name for peer in PEERS)}")  # fmt: skip
    add("--tokens", type=int, default=4096, help="of a prompt that is stored and loaded (default: %(default)s)")
    add("--chunk-tokens", type=int, default=256, help="a multiple of 16 (default: %(default)s)")
    add("--threads", type=int, default=2, help="of each system, where it can be set (default: %(default)s)")
    add("--path", type=Path, help="a folder on the disk to measure (default: /var/tmp)")
    return parser


def plan_of(given: argparse.Namespace) -> RunPlan:
    """What to do."""
    if given.quick:
        return RunPlan(1024, 2, 5, LOOKUP_TOKENS, given.chunk_tokens, given.threads, given.path)
    return RunPlan(given.tokens, 3, 20, LOOKUP_TOKENS, given.chunk_tokens, given.threads, given.path)


def main() -> int:
    parser = command_line()
    given = parser.parse_args()
    if min(given.rounds, given.threads) < 1:
        parser.error("--rounds and --threads are at least 1")
    if given.chunk_tokens < 1 or given.chunk_tokens % 16 or 1024 % given.chunk_tokens:
        parser.error("--chunk-tokens is a multiple of 16 that divides 1024")
    if given.tokens < given.chunk_tokens or given.tokens % given.chunk_tokens:
        parser.error("--tokens is a multiple of --chunk-tokens")
    peers = [peer for peer in PEERS if not given.only or peer.name in given.only]
    if missing := [peer for peer in peers if not peer.python.exists()]:
        parser.error(f"{', '.join(str(peer.python) for peer in missing)} not there: `make bench-peers` makes them")
    rounds, plan = 1 if given.quick else given.rounds, plan_of(given)
    obey_signals()
    try:
        with disk_folder(given.path) as folder:
            found: dict[str, Any] = {"machine": machine(Path(folder))}
        with ProgressBar("bench_peers", len(peers) * (rounds + 1)) as live:
            found |= run(peers, plan, rounds, live)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    command = shlex.join(["python", "-m", "scripts", "peers", *sys.argv[1:]])
    result = result_of(plan, peers, rounds, command, found)
    if given.write is not None:
        given.write.write_text(page(result), encoding="utf-8")
    if given.json:
        print_json(result)
    else:
        show(result)
    return 0 if all(result["systems"][peer.name]["figures"] for peer in peers) else EXIT_BAD


if __name__ == "__main__":
    sys.exit(main())
