"""The commands' arguments: their names, types and help."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvoffloadd import __version__
from kvoffloadd.cli import about
from kvoffloadd.cli.parser import Parser, commands_of
from kvoffloadd.suggestion import did_you_mean
from kvoffloadd.units import parse_bytes, parse_duration

RETAIN_S_MAX, PRIORITY_MAX = 30 * 86_400, 100
"""The limits of `protocol.messages`, which is loaded only to run a command; a test compares them."""

TRACE_BLOCK_HELP = "tokens per hash id of the trace; default: 16 if requests have a chat_id, otherwise 512"

Run = Callable[[argparse.Namespace], int]
"""Runs a command."""


COMMANDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Try it": ("demo", "bench", "doctor", "plan", "advise"),
        "Run it": ("serve", "flags", "config", "completion", "man", "help"),
        "Watch a running daemon": ("status", "top", "verify"),
        "Change what it holds": ("retained", "retain", "forget", "prefetch", "drain", "clear"),
    }
)
"""Every command, grouped by purpose as in `--help`."""


SYNONYMS: Mapping[str, str] = MappingProxyType(
    {"start": "serve", "run": "serve", "info": "status", "stats": "status", "monitor": "top", "check": "doctor"}
    | {"flush": "clear", "purge": "clear", "stop": "Ctrl-C where it serves, or systemctl stop"}
)
"""The words of other programs for commands."""


class CommandLine(Parser):
    """The parser of all commands, with a help that lists the commands by use, which argparse does not support."""

    def __init__(self, **settings: Any) -> None:
        """Makes a parser. `settings`: as for any parser."""
        super().__init__(**settings)
        self.synonyms = SYNONYMS
        self.summaries: dict[str, str] = {}
        """The summary of each command, in one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Ends the process at an option of a command that comes before the command: argparse would take the option's
        value for the command.
        """
        words = sys.argv[1:] if args is None else list(args)
        option = words[0].partition("=")[0] if words else ""
        of_commands = {name for _, child in commands_of(self) for name in child.long_options()}
        if option in of_commands.difference(self.long_options()):
            right = self._with_command_first(option, words)
            self.error(f"{option} comes after the command{': ' if right else ''}{shlex.join(right)}")
        return super().parse_known_args(args, namespace)

    def _with_command_first(self, option: str, words: Sequence[str]) -> list[str]:
        """Returns the command line that was probably meant; empty: it is not clear which command that is. Words that
        name commands may be values of options.
        """
        named = {word for word in words if word in self.summaries}
        for name, child in commands_of(self):
            if named == {name} and option in child.long_options() and not any(commands_of(child)):
                at = max(place for place, word in enumerate(words) if word == name)
                return [self.prog, name, *words[:at], *words[at + 1 :]]
        return []

    def format_help(self) -> str:
        """Returns the text of `--help`."""
        parts = [self.format_usage(), f"\n{self.description}\n"]
        for title, names in COMMANDS.items():
            parts.append(f"\n{title}:\n")
            parts += [f"  {name:<12}{self.summaries[name]}\n" for name in names]
        parts.append(
            "\n`kvoffloadd help COMMAND` shows the options of a command; `kvoffloadd --version` shows the version.\n"
        )
        return "".join(parts) + f"{self.epilog}\n"


def make_parser() -> CommandLine:
    """Makes the parser of every command; the parsed arguments have `command`, the function that runs it, and this
    `parser`.
    """
    parser = CommandLine(
        prog="kvoffloadd",
        usage="%(prog)s [--version] COMMAND ...",
        description="Keeps the KV caches of a host's inference engines in memory, on disk and in a remote store.",
        epilog="Exit codes: 0 success, 1 findings, or an unfinished drain or clear, 2 bad usage or config, "
        "3 daemon unreachable, 4 daemon refused, 70 `serve` can't go on, 75 `serve` may be tried again soon, "
        "130 or 143 ended by SIGINT or SIGTERM, which end `serve` and a live `top` with 0.",
    )
    parser.set_defaults(command=about.without_command, parser=parser)
    parser.add_argument("--version", action="version", version=f"kvoffloadd {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", prog="kvoffloadd", parser_class=Parser)

    def add(name: str, text: str, run: Run | None = None, group: Any = subparsers) -> Parser:
        child: Parser = group.add_parser(name, help=text, description=text)
        child.set_defaults(command=run or _loaded(name), parser=parser)
        if group is subparsers:
            parser.summaries[name] = text
        return child

    serve = add("serve", "Run the daemon in the foreground.")
    _add_config_options(serve)
    serve.add_argument(
        "--faults", metavar="TEXT", default="",
        help='inject faults, for example "delay_s=0.5,fail_every=100" (only for tests of the daemon). delay_s=SECONDS: '
        "each chunk of a copy takes this much longer; hold=PATH: each chunk waits while the file PATH exists; "
        "corrupt_every=N: every Nth load is damaged; fail_every=N: every Nth copy fails; disk=PATH: the file PATH "
        "lists faults of disks",
    )  # fmt: skip

    status = add("status", "Show hits, tiers and engines of a running daemon, or all its figures.")
    _add_status_options(status)

    top = add("top", "Show live what a running daemon does. Quit with q or Ctrl-C.")
    _add_top_options(top)

    verify = add("verify", "Make a running daemon check itself. Exits with 1 if it finds a problem.")
    _add_verify_options(verify)

    clear = add("clear", "Drop every key of every namespace, or of some (root or the daemon's user only).")
    _add_clear_options(clear)

    retained = add("retained", "List what clients want kept for a time, and what it takes.")
    retain = add("retain", "Keep a named prefix for so long, from now on.")
    forget = add("forget", "Keep a named prefix no longer. Its keys stay until they are evicted.")
    prefetch = add("prefetch", "Bring a named prefix from disk and the remote store into memory, before its traffic.")
    _add_claim_options(retained, retain, forget, prefetch)

    drain = add("drain", "Wait until running jobs have ended and all stored payloads have a checksum.")
    drain.add_argument(
        "--deadline-s", type=_deadline, default=60.0, metavar="SECONDS", help="give up after this time; default: 60"
    )

    for client_command in (status, top, verify, clear, retained, retain, forget, prefetch, drain):
        client_command.add_argument(
            "--socket",
            type=_absolute,
            metavar="PATH",
            help="the daemon's; default: KVOFFLOADD_SOCKET, or the first that answers of yours and the service's",
        )

    doctor = add("doctor", "Check this host for problems that would keep the daemon from working.")
    _add_config_options(doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    demo = add("demo", "Simulate a chat on two workers, kill one and the daemon, and compare every byte.")
    _add_demo_options(demo)
    bench = add("bench", "Measure memory, disk, requests and GPUs, and compare them with the machine's limits.")
    _add_bench_options(bench)

    _add_flags_options(add("flags", "Print the command that starts an engine with the daemon, to be copied."))

    completion = add("completion", "Print a script that completes these commands in a shell.", about.completion)
    completion.add_argument("shell", choices=about.SHELLS, metavar="SHELL", help=", ".join(about.SHELLS))

    _add_plan_options(add("plan", "Compute the size of a model's KV cache, and how much of it the daemon can hold."))

    _add_advise_options(add("advise", "Tell what more or less memory or disk would give, on a trace of real requests."))

    add("man", "Print the manual page: kvoffloadd man | man -l -", about.man)
    add("help", "Show this help, or that of a command.", about.show_help).add_argument(
        "words", nargs="*", metavar="COMMAND", help="the command; default: all of them"
    )

    _add_config_commands(add("config", "Check or show config files.", about.without_command), add)
    return parser


def _add_config_commands(parser: Parser, add: Callable[..., Parser]) -> None:
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    check = add("check", "Check a config file and list all problems.", _loaded("config_check"), commands)
    check.add_argument("file", type=Path, metavar="FILE")
    show = add("show", "Print the config that `serve` would use, as TOML.", _loaded("config_show"), commands)
    _add_config_options(show)


def _loaded(name: str) -> Run:
    """Returns the function of this name in `commands`, which is loaded only to run it: that takes half a second."""

    def run(arguments: argparse.Namespace) -> int:
        commands = import_module("kvoffloadd.cli.commands")
        code: int = getattr(commands, name)(arguments)
        return code

    return run


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file; without it, every key has its default value"
    )
    parser.add_argument(
        "--socket", type=_absolute, metavar="PATH",
        help="override server.socket; if neither is set: KVOFFLOADD_SOCKET, or the service's place for root, and one "
        "of their own for other users",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=_size, metavar="SIZE",
        help='override memory.capacity_bytes, for example "8GiB"; if neither is set: 4GiB',
    )  # fmt: skip
    parser.add_argument("--policy", metavar="NAME", help="override memory.policy")
    parser.add_argument(
        "--disk", type=_disk_root, action="append", default=[], metavar="PATH=SIZE",
        help='override disk.roots, for example "/nvme0/kvoffloadd=1TiB"; repeatable',
    )  # fmt: skip
    parser.add_argument(
        "--set", type=_assignment, action="append", default=[], metavar="SECTION.KEY=VALUE",
        help="override any config key; repeatable",
    )  # fmt: skip


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--turns", type=_count, default=240, help="number of turns of the chat; default: %(default)s")
    add("--seconds", type=_deadline, default=30.0, help="end the chat after this time; default: %(default).0f")
    add("--memory", type=_size, default="256MiB", metavar="SIZE", help="size of the memory tier; default: %(default)s")
    add("--seed", type=_seed, default=0, help="random seed of the chat; default: %(default)s")
    add("--json", action="store_true", help="print one JSON object")


PARTS = ("memory", "disk", "requests", "gpu")
"""The parts that `bench` measures."""


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--only",
        choices=PARTS,
        action="append",
        default=[],
        help="measure this part only; repeatable; default: all parts",
    )
    add("--bytes", type=_size, default="256MiB", metavar="SIZE", help="size of one job; default: %(default)s")
    add(
        "--rounds", type=_count, default=5, help="number of rounds; results are medians over them; default: %(default)s"
    )
    add("--folder", type=_absolute, metavar="PATH", help="folder on the disk to measure; default: /var/tmp")
    add("--json", action="store_true", help="print one JSON object")


ENGINES = ("any", "vllm", "sglang")
"""The engines that `plan` supports."""

SECTIONS = (
    "daemon", "memory", "cache", "disk", "remote", "lookups", "namespaces", "retention", "quotas", "clears",
    "deletions", "transfers", "running", "leases", "quarantine", "slow_jobs", "lanes", "hash_lane", "devices",
    "server", "open_sessions", "sessions", "accounts", "loop",
)  # fmt: skip
"""The sections of `status`. `daemon` has the figures that belong to no other one."""


def _add_status_options(status: argparse.ArgumentParser) -> None:
    status.add_argument(
        "sections", type=_section, nargs="*", metavar="SECTION",
        help=f"show all figures of these sections: {', '.join(SECTIONS)}",
    )  # fmt: skip
    status.add_argument("--all", action="store_true", help="show all figures of all sections")
    status.add_argument("--json", action="store_true", help="print one JSON object")


def _add_top_options(top: argparse.ArgumentParser) -> None:
    top.add_argument("--once", action="store_true", help="print one screen for one interval, then exit")
    top.add_argument("--json", action="store_true", help="print one JSON object per line for each interval")
    top.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="time between updates; default: 1"
    )
    top.add_argument("--svg", type=Path, metavar="FILE", help="write the last screen to this SVG file")


def _add_verify_options(verify: argparse.ArgumentParser) -> None:
    verify.add_argument(
        "--payloads", action="store_true", help="also verify the checksum of every sealed payload in memory"
    )
    verify.add_argument("--disk", action="store_true", help="also read and check every record on disk")
    verify.add_argument("--repair", action="store_true", help="drop bad records on disk; needs --disk or --root")
    verify.add_argument(
        "--root", type=_absolute, action="append", default=[], metavar="PATH",
        help="check the files of this disk root without a daemon; repeatable",
    )  # fmt: skip
    verify.add_argument("--json", action="store_true", help="print one JSON object")


def _add_clear_options(clear: argparse.ArgumentParser) -> None:
    clear.add_argument(
        "--namespace", metavar="PATTERN",
        help="only of the namespaces whose names, as `status namespaces` shows them, match this shell pattern",
    )  # fmt: skip
    clear.add_argument(
        "--user", type=_user, metavar="USER", help="only of the namespaces of this user, by id or by name"
    )
    clear.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def _add_claim_options(retained: Parser, retain: Parser, forget: Parser, prefetch: Parser) -> None:
    retained.add_argument("--json", action="store_true", help="print one JSON object")
    for command in (retain, forget, prefetch):
        which = command.add_mutually_exclusive_group(required=True)
        which.add_argument("name", nargs="?", default="", metavar="NAME", help="as `retained` shows it")
        which.add_argument("--number", type=_count, default=0, help="of one claim, in place of a name")
    retain.add_argument(
        "--for", dest="seconds", type=_duration, required=True, metavar="TIME",
        help='for example "90s", "20m", "2h" or "7d"; at most 30 days',
    )  # fmt: skip
    retain.add_argument(
        "--priority", type=_priority, metavar="NUMBER", help="0 to 100; the lowest goes first; default: as it is"
    )


def _add_flags_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", choices=("vllm", "sglang"), metavar="ENGINE", help="vllm or sglang")
    parser.add_argument(
        "--model-config", type=Path, metavar="FILE", help="the model's config.json; without it, MODEL stands for it"
    )
    parser.add_argument(
        "--socket", type=_absolute, metavar="PATH", help="the daemon's; default: the engine looks for it"
    )


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-config", type=Path, required=True, metavar="FILE", help="the model's config.json, as on Hugging Face"
    )
    parser.add_argument(
        "--engine", choices=ENGINES, default=ENGINES[0],
        help="sglang: plan host pools, flags and the daemon's settings for SGLang; vllm, and any, the default: plan "
        "vLLM's layouts",
    )  # fmt: skip
    parser.add_argument(
        "--block-size",
        type=_count,
        metavar="TOKENS",
        help="the engine's block size; default: 16, or 64 with --engine sglang",
    )
    parser.add_argument(
        "--tp", type=_count, default=1, metavar="RANKS", help="number of tensor-parallel ranks; default: 1"
    )
    parser.add_argument(
        "--attn-pack-size", dest="pack_size", type=_count, default=0, metavar="LAYERS",
        help="attention layers per page, if a Mamba state sets the page size; no released engine packs them",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtype", default="auto", metavar="DTYPE", help="fp8, bfloat16, ...; default: auto, the model's dtype"
    )
    parser.add_argument(
        "--no-hybrid",
        dest="hybrid",
        action="store_false",
        help="plan for an engine whose hybrid cache manager is off: one group",
    )
    parser.add_argument(
        "--share-tp", action="store_true", help="share keys with engines of other tensor-parallel sizes"
    )
    parser.add_argument("--memory", type=_size, metavar="SIZE", help="size of the memory tier; default: 4GiB")
    parser.add_argument(
        "--disk", type=_size, metavar="SIZE", help="size of the disk tier, with one root; default: none"
    )
    parser.add_argument(
        "--gpu-cache", type=_size, metavar="SIZE", help="size of the KV cache on each GPU; with --engine sglang"
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt-tokens", type=_count, default=8000, metavar="TOKENS", help="length of a typical prompt; default: 8000"
    )
    prompts.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace of real prompts: JSON lines with input_length and hash_ids"
    )
    parser.add_argument(
        "--trace-block-tokens",
        type=_count,
        metavar="TOKENS",
        help=TRACE_BLOCK_HELP,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_advise_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="a trace of real requests: JSON lines with hash_ids"
    )
    parser.add_argument("--trace-block-tokens", type=_count, metavar="TOKENS", help=TRACE_BLOCK_HELP)
    token = parser.add_mutually_exclusive_group(required=True)
    token.add_argument("--model-config", type=Path, metavar="FILE", help="the model's config.json: what a token takes")
    token.add_argument("--token-bytes", type=_count, metavar="BYTES", help="what a token takes, on all ranks")
    parser.add_argument(
        "--tp", type=_count, default=1, metavar="RANKS", help="number of tensor-parallel ranks; default: 1"
    )
    parser.add_argument(
        "--kv-dtype", default="auto", metavar="DTYPE", help="fp8, bfloat16, ...; default: auto, the model's dtype"
    )
    parser.add_argument("--memory", type=_size, default="4GiB", metavar="SIZE", help="today's memory; default: 4GiB")
    parser.add_argument("--disk", type=_size, metavar="SIZE", help="today's disk; default: none")
    parser.add_argument("--policy", metavar="NAME", help="eviction policy; default: the daemon's default")
    parser.add_argument(
        "--samples", type=_count, default=3, metavar="N", help="simulations with other keys; default: 3"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 32):
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number above 0')
    return int(text)


def _section(text: str) -> str:
    # Not by `choices`: until Python 3.12, argparse compares the empty list with them, too.
    if text not in SECTIONS:
        raise argparse.ArgumentTypeError(f'"{text}" is no section of the status{did_you_mean(text, SECTIONS)}')
    return text


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 1 << 32):
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number from 0 to 4294967295')
    return int(text)


def _assignment(text: str) -> tuple[str, str]:
    dotted, equals, value = text.partition("=")
    if not equals or "." not in dotted:
        raise argparse.ArgumentTypeError(f'"{text}" is not section.key=value')
    return dotted.strip(), value.strip()


def _absolute(text: str) -> Path:
    # A relative path is relative to the caller's directory, even after a daemon has changed its own.
    return Path(text).absolute()


def _size(text: str) -> str:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{text}" {error}') from None
    return text


def _disk_root(text: str) -> tuple[str, str]:
    # The last equals sign: a path may contain some, a size none.
    path, equals, size = text.rpartition("=")
    if not (equals and path):
        raise argparse.ArgumentTypeError(f'"{text}" is not PATH=SIZE, like "/nvme0/kvoffloadd=1TiB"')
    return str(_absolute(path)), _size(size.strip())


def _interval(text: str) -> float:
    seconds = _deadline(text)
    if seconds < 0.1:
        raise argparse.ArgumentTypeError(f'"{text}" is less than 0.1 seconds')
    return seconds


def _user(text: str) -> int:
    from kvoffloadd import checks

    try:
        return checks.uids([int(text) if text.isascii() and text.isdigit() else text])[0]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{text}" {error}') from None
    if not 0 < seconds <= RETAIN_S_MAX:
        raise argparse.ArgumentTypeError(f'"{text}" is not above 0 and at most 30 days')
    return seconds


def _priority(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= PRIORITY_MAX):
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number from 0 to {PRIORITY_MAX}')
    return int(text)


def _deadline(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of seconds') from None
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f'"{text}" is not between 0 and 86,400 seconds')
    return seconds
