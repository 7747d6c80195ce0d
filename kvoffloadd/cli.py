"""The command line: `kvoffloadd serve`, an operator's questions and orders to a running daemon, and `plan` before all.

Exit codes: 0 done, 1 the answer is bad news (findings, or a drain that missed its deadline), 2 usage or config,
3 no daemon can be reached, 4 the daemon refused or did not answer in time, or a disk root can't be checked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffloadd import __version__, config, errors
from kvoffloadd.client import Client
from kvoffloadd.model import DROPPED
from kvoffloadd.units import format_bytes, parse_bytes

EXIT_OK, EXIT_BAD_NEWS, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_REFUSED = 0, 1, 2, 3, 4
EXIT_INTERRUPTED = 130  # what a shell says of a program ended by SIGINT

DEFAULT_SOCKET = config.ServerConfig().socket
VERIFY_DEADLINE_S, VERIFY_DISK_DEADLINE_S = 3600.0, 86_400.0
"""For an audit with payloads, and with records on disk: a terabyte at a few GB/s takes minutes, slow disks hours.
Whoever waits at a terminal may interrupt it."""

PLAN_TERMS = ("block_size", "tp", "pack_size", "kv_dtype", "hybrid", "share_tp", "prompt_tokens")
"""Options of `plan` that go to the planner as they are."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (module docstring). Never raises for what an operator can get wrong."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        sys.stdout.flush()
    except errors.ConfigError as error:
        return _complain(str(error), EXIT_USAGE)
    except errors.DaemonUnreachableError as error:
        return _complain(str(error), EXIT_UNREACHABLE)
    except errors.ConnectionLostError as error:
        return _complain(f"the daemon went away before it answered: {error}", EXIT_UNREACHABLE)
    except errors.DeadlineError as error:
        return _complain(f"the daemon did not answer in time: {error}", EXIT_REFUSED)
    except errors.KvOffloadError as error:
        return _complain(f"refused: {error}", EXIT_REFUSED)
    except BrokenPipeError:
        # Whoever read the output has seen enough; a second error at interpreter exit helps nobody.
        sys.stderr.close()
        return EXIT_BAD_NEWS
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


# --- the daemon itself ------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    chosen = _load(arguments)
    # Imported here, as in the other commands: each loads what it needs, and a wrong config is told before all that.
    from kvoffloadd import log
    from kvoffloadd.daemon import run

    log.setup(chosen.log)
    return run(chosen, arguments.faults, lambda: _load(arguments))


def _config_check(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cache.policy import POLICIES

    chosen = config.load(arguments.file)
    policy = chosen.memory.policy
    if policy and policy not in POLICIES:
        raise errors.ConfigError(
            f'{arguments.file}: memory.policy = "{policy}": unknown; known are {", ".join(sorted(POLICIES))}'
        )
    try:
        config.check_memory_fits(chosen.memory.capacity_bytes)
    except errors.ConfigError as error:
        # No error: the file may be meant for another machine.
        sys.stderr.write(f"note: it would not start here: {error}\n")
    sys.stdout.write(f"{arguments.file}: ok\n")
    return EXIT_OK


def _config_show(arguments: argparse.Namespace) -> int:
    from kvoffloadd.report import config_text

    sys.stdout.write(config_text(_load(arguments)))
    return EXIT_OK


def _load(arguments: argparse.Namespace) -> config.Config:
    overrides: dict[str, str] = dict(arguments.set)
    # Quoted, so that text stays text even where it would be a TOML value.
    if arguments.socket is not None:
        overrides["server.socket"] = json.dumps(str(arguments.socket), ensure_ascii=False)
    if arguments.memory is not None:
        overrides["memory.capacity_bytes"] = json.dumps(arguments.memory)
    if arguments.policy is not None:
        overrides["memory.policy"] = json.dumps(arguments.policy)
    if arguments.disk:
        roots = (f"{{ path = {json.dumps(path, ensure_ascii=False)}, capacity = {json.dumps(size)} }}"
                 for path, size in arguments.disk)  # fmt: skip
        overrides["disk.roots"] = f"[{', '.join(roots)}]"
    return config.load(arguments.config, overrides)


# --- before there is a daemon --------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> int:
    from kvoffloadd.planner import PlanInputs, make_plan, plan_json, print_plan, read_model, read_trace

    terms: dict[str, Any] = {name: getattr(arguments, name) for name in PLAN_TERMS}
    sizes = {"memory_bytes": arguments.memory, "disk_bytes": arguments.disk}
    terms |= {name: parse_bytes(size) for name, size in sizes.items() if size is not None}
    model = read_model(arguments.model_config)
    trace = read_trace(arguments.trace, arguments.trace_block_tokens) if arguments.trace else None
    plan = make_plan(model, PlanInputs(**terms), trace)
    if arguments.json:
        _print_json(plan_json(plan))
    else:
        print_plan(plan)
    return EXIT_OK


# --- questions and orders to a running daemon -------------------------------------------------------


def _status(arguments: argparse.Namespace) -> int:
    from kvoffloadd.report import print_status

    with _client(arguments) as client:
        status = client.status()
    if arguments.json:
        _print_json(status)
    else:
        print_status(status)
    return EXIT_OK


def _top(arguments: argparse.Namespace) -> int:
    from kvoffloadd.top.screen import Screen

    screen = Screen(arguments.socket, arguments.interval, arguments.json, arguments.svg)
    screen.once() if arguments.once else screen.run()
    return EXIT_OK


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.repair and not (arguments.disk or arguments.root):
        return _complain(
            "--repair needs --disk or --root: only records on disk can be dropped for being bad", EXIT_USAGE
        )
    if arguments.root and arguments.payloads:
        return _complain("--payloads asks a daemon about its memory, --root asks none", EXIT_USAGE)
    return _verify_roots(arguments) if arguments.root else _verify_daemon(arguments)


def _verify_daemon(arguments: argparse.Namespace) -> int:
    from kvoffloadd.log import printable
    from kvoffloadd.report import ProgressLine

    deadline_s = VERIFY_DEADLINE_S if arguments.payloads else None
    if arguments.disk:
        deadline_s = VERIFY_DISK_DEADLINE_S
    with _client(arguments) as client, ProgressLine("the daemon audits itself"):
        verified = client.verify(
            payloads=arguments.payloads, disk=arguments.disk, repair=arguments.repair, deadline_s=deadline_s
        )
    findings = list(verified.findings)
    repaired = sum(finding.endswith(DROPPED) for finding in findings) if arguments.repair else 0
    if arguments.json:
        counts = {"slots": verified.slots, "payloads": verified.payloads, "records": verified.records}
        _print_json({"findings": findings, "repaired": repaired, **counts})
    else:
        sys.stdout.writelines(f"finding: {printable(finding)}\n" for finding in findings)
        hashed = f", {verified.payloads:,} payloads hashed again" if arguments.payloads else ""
        read = f", {verified.records:,} records on disk read" if arguments.disk else ""
        dropped = f", {repaired} repaired," if arguments.repair else ""
        sys.stdout.write(f"{_findings(len(findings))}{dropped} in {verified.slots:,} slots{hashed}{read}\n")
    return EXIT_BAD_NEWS if len(findings) > repaired else EXIT_OK


def _findings(count: int) -> str:
    return "1 finding" if count == 1 else f"{count:,} findings"


def _verify_roots(arguments: argparse.Namespace) -> int:
    """Without a daemon. A root that can't be checked is no reason to leave out the others."""
    from kvoffloadd.log import printable
    from kvoffloadd.report import ProgressLine
    from kvoffloadd.storage.disk.repair import check_root

    code = EXIT_OK
    checked: list[dict[str, object]] = []
    for root in arguments.root:
        try:
            with ProgressLine(f"{root}") as line:
                report = check_root(root, repair=arguments.repair, progress=line.update)
        except (errors.KvOffloadError, OSError) as error:
            code = _complain(f"{root} can't be checked: {error}", EXIT_REFUSED)
            checked.append({"root": root, "error": str(error)})
            continue
        if len(report.findings) > report.repaired:
            code = code or EXIT_BAD_NEWS
        checked.append({
            "root": root, "segments": report.segments, "records": report.records, "bytes": report.bytes,
            "findings": report.findings, "repaired": report.repaired,
        })  # fmt: skip
        if not arguments.json:
            sys.stdout.writelines(f"finding: {root}: {printable(finding)}\n" for finding in report.findings)
            repaired = f", {report.repaired:,} repaired," if arguments.repair else ""
            sys.stdout.write(
                f"{root}: {_findings(len(report.findings))}{repaired} in {report.records:,} records, "
                f"{report.segments:,} segments, {format_bytes(report.bytes)}\n"
            )
    if arguments.json:
        _print_json({"roots": checked})
    return code


def _clear(arguments: argparse.Namespace) -> int:
    if not arguments.yes and not _confirmed(
        f"Drop every key of every namespace from the daemon at {arguments.socket}?"
    ):
        return _complain("nothing was dropped: say --yes, or answer yes at a terminal", EXIT_USAGE)
    with _client(arguments) as client:
        cleared = client.clear(everything=True)  # a worker clears its own namespace, through the library
    sys.stdout.write(f"dropped {cleared.keys:,} keys, {format_bytes(cleared.bytes)}\n")
    return EXIT_OK


def _drain(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        drained = client.drain(deadline_s=arguments.deadline_s, everything=True)
    if drained.jobs or drained.unsealed:
        sys.stdout.write(f"deadline passed: {drained.jobs:,} jobs still run, {drained.unsealed:,} slots unsealed\n")
        return EXIT_BAD_NEWS
    sys.stdout.write("drained: every job has ended and all that was stored is sealed\n")
    return EXIT_OK


def _client(arguments: argparse.Namespace) -> Client:
    from kvoffloadd.client import Client

    # A single attempt: an operator wants to know now that no daemon is there.
    return Client(arguments.socket, namespace=None, role="observer", connect_deadline_s=0)


def _confirmed(question: str) -> bool:
    """Whether somebody at a terminal said yes."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, default=_jsonable) + "\n")


def _jsonable(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"kvoffloadd: {message}\n")
    return code


# --- arguments ----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvoffloadd",
        description="A KV-cache offload daemon, and the commands for its operator.",
        epilog="Exit codes: 0 done, 1 findings or a missed drain, 2 usage or config, 3 unreachable, 4 refused.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvoffloadd {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Any, text: str, group: Any = commands) -> argparse.ArgumentParser:
        child: argparse.ArgumentParser = group.add_parser(name, help=text, description=text, allow_abbrev=False)
        child.set_defaults(command=run)
        return child

    serve = add("serve", _serve, "Run the daemon in the foreground.")
    _add_config_options(serve)
    serve.add_argument("--faults", metavar="TEXT", default="", help="inject faults; for tests of the daemon only")

    status = add("status", _status, "Counters and gauges of a running daemon.")
    status.add_argument("--json", action="store_true", help="one JSON object on standard output")

    top = add("top", _top, "What a running daemon does, as it changes; q or Ctrl-C ends it.")
    top.add_argument("--once", action="store_true", help="two looks, an interval apart, and one picture")
    top.add_argument("--json", action="store_true", help="one JSON object a line for each interval")
    top.add_argument("--interval", type=_interval, default=1.0, metavar="SECONDS", help="default: 1")
    top.add_argument("--svg", type=Path, metavar="FILE", help="write what was shown last there, as a picture")

    verify = add("verify", _verify, "Let the daemon audit itself; exit 1 if it finds anything wrong.")
    verify.add_argument("--payloads", action="store_true", help="hash every sealed payload again, too")
    verify.add_argument("--disk", action="store_true", help="read and check every record on disk, too")
    verify.add_argument("--repair", action="store_true", help="drop the records on disk that are bad")
    verify.add_argument(
        "--root", type=_absolute, action="append", default=[], metavar="PATH",
        help="check the files of this disk root instead, without a daemon; repeatable",
    )  # fmt: skip
    verify.add_argument("--json", action="store_true", help="one JSON object on standard output")

    clear = add("clear", _clear, "Drop every key of every namespace (root or the daemon's user only).")
    clear.add_argument("--yes", action="store_true", help="do not ask")

    drain = add("drain", _drain, "Wait until the running jobs have ended and all that they stored is sealed.")
    drain.add_argument("--deadline-s", type=_deadline, default=60.0, metavar="SECONDS", help="default: 60")

    for client_command in (status, top, verify, clear, drain):
        client_command.add_argument(
            "--socket", type=_absolute, default=DEFAULT_SOCKET, metavar="PATH", help="default: %(default)s"
        )

    _add_plan_options(add("plan", _plan, "What a model's KV cache will be, and how much of it the daemon would hold."))

    config_commands = commands.add_parser("config", help="Check or show config files.").add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    check = add("check", _config_check, "Check a config file; say every problem in it.", config_commands)
    check.add_argument("file", type=Path, metavar="FILE")
    show = add("show", _config_show, "Print the config that `serve` would use, as TOML.", config_commands)
    _add_config_options(show)
    return parser


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; without it every key has its default")
    parser.add_argument("--socket", type=_absolute, metavar="PATH", help="instead of server.socket")
    parser.add_argument("--memory", type=_size, metavar="SIZE", help='instead of memory.capacity_bytes, like "8GiB"')
    parser.add_argument("--policy", metavar="NAME", help="instead of memory.policy")
    parser.add_argument(
        "--disk", type=_disk_root, action="append", default=[], metavar="PATH=SIZE",
        help='instead of disk.roots, like "/nvme0/kvoffloadd=1TiB"; repeatable',
    )  # fmt: skip
    parser.add_argument(
        "--set", type=_assignment, action="append", default=[], metavar="SECTION.KEY=VALUE",
        help="instead of the file's value; repeatable",
    )  # fmt: skip


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-config", type=Path, required=True, metavar="FILE", help="the model's config.json, as on Hugging Face"
    )
    parser.add_argument("--block-size", type=_count, default=16, metavar="TOKENS", help="the engine's; default: 16")
    parser.add_argument("--tp", type=_count, default=1, metavar="RANKS", help="tensor-parallel ranks; default: 1")
    parser.add_argument(
        "--attn-pack-size", dest="pack_size", type=_count, default=0, metavar="LAYERS",
        help="attention layers on a page, where a Mamba state sets it",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtype", default="auto", metavar="DTYPE", help="auto (default, the model's), fp8, bfloat16 ..."
    )
    parser.add_argument(
        "--no-hybrid", dest="hybrid", action="store_false", help="the engine's hybrid cache manager is off: one group"
    )
    parser.add_argument(
        "--share-tp", action="store_true", help="ranks of other tensor-parallel sizes are to read it, too"
    )
    parser.add_argument("--memory", type=_size, metavar="SIZE", help="of the memory tier; default: the daemon's, 4GiB")
    parser.add_argument("--disk", type=_size, metavar="SIZE", help="of the disk tier, one root; default: none")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt-tokens", type=_count, default=8000, metavar="TOKENS", help="a typical prompt; default: 8000"
    )
    prompts.add_argument(
        "--trace", type=Path, metavar="FILE", help="prompts as they were: input_length and hash_ids in JSON lines"
    )
    parser.add_argument(
        "--trace-block-tokens", type=_count, default=512, metavar="TOKENS", help="of a hash id; default: 512"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 32):
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number above 0')
    return int(text)


def _assignment(text: str) -> tuple[str, str]:
    dotted, equals, value = text.partition("=")
    if not equals or "." not in dotted:
        raise argparse.ArgumentTypeError(f'"{text}" is not section.key=value')
    return dotted.strip(), value.strip()


def _absolute(text: str) -> Path:
    # A relative path means the caller's directory, also after a daemon has changed its own.
    return Path(text).absolute()


def _size(text: str) -> str:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{text}" {error}') from None
    return text


def _disk_root(text: str) -> tuple[str, str]:
    # The last equals sign: a path may have some, a size has none.
    path, equals, size = text.rpartition("=")
    if not (equals and path):
        raise argparse.ArgumentTypeError(f'"{text}" is not PATH=SIZE, like "/nvme0/kvoffloadd=1TiB"')
    return str(_absolute(path)), _size(size.strip())


def _interval(text: str) -> float:
    seconds = _deadline(text)
    if seconds < 0.1:
        raise argparse.ArgumentTypeError(f'"{text}" is less than 0.1 seconds')
    return seconds


def _deadline(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of seconds') from None
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f'"{text}" is not between 0 and 86,400 seconds')
    return seconds
