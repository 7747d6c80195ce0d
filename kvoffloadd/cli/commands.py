"""The commands, from their parsed arguments to their exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from kvoffloadd import client, config, errors
from kvoffloadd.cli.exits import EXIT_BAD_NEWS, EXIT_OK, EXIT_REFUSED, EXIT_USAGE, complain
from kvoffloadd.cli.interrupts import interrupt_command
from kvoffloadd.linux import standarderror
from kvoffloadd.model import DROPPED
from kvoffloadd.units import BYTES_MAX, format_bytes, format_seconds, missing_unit, parse_bytes

VERIFY_DEADLINE_S, VERIFY_DISK_DEADLINE_S = 3600.0, 86_400.0
"""Deadlines of an audit with payloads, and with records on disk: a terabyte at a few GB/s takes minutes, slow disks
hours. An operator at a terminal may interrupt it.
"""

DEMO_BYTES_MIN = 16 << 20
"""Enough for some turns of each conversation."""

BENCH_JOBS = 6
"""How often the bytes of a job are in memory, in the daemon, its worker and what they are compared with."""

PLAN_TERMS = ("tp", "pack_size", "kv_dtype", "hybrid", "share_tp", "prompt_tokens")
"""Options of `plan` that go to the planner as they are."""


# --- the daemon itself ------------------------------------------------------------------------------


def serve(arguments: argparse.Namespace) -> int:
    standarderror.take_over()
    chosen = _load(arguments)
    # Imported here, as in the other commands: each loads only what it needs, and a wrong config is reported before
    # that.
    from kvoffloadd import log
    from kvoffloadd.daemon import run

    log.setup(chosen.log)
    check = (lambda: _check_given_roots(chosen.disk)) if arguments.disk else (lambda: None)
    return run(chosen, arguments.faults, lambda: _load(arguments), check)


def _check_given_roots(disk: config.DiskConfig) -> None:
    """Raises ConfigError for roots that can't be used. Those of a config file are not checked: the daemon starts
    without them and takes them in when they come. Whoever types a path waits for an answer.
    """
    from kvoffloadd.doctor import Host, Verdict
    from kvoffloadd.doctor.places import check_disks, try_disks

    host = Host.here()
    found = [one for one in check_disks(disk, host) if one.verdict is Verdict.PROBLEM]
    found = found or list(try_disks(disk, host))
    if found:
        lines = (f"{one.subject}: {one.found}\n  -> {one.remedy}" for one in found)
        raise errors.ConfigError("\n".join(["--disk can't be used:", *lines]))


def config_check(arguments: argparse.Namespace) -> int:
    from kvoffloadd.log import printable
    from kvoffloadd.storage.arenafile import check_pool_fits

    chosen = config.load(arguments.file)
    try:
        check_pool_fits(chosen.memory)
    except errors.ConfigError as error:
        # No error: the file may be meant for another machine.
        sys.stderr.write(f"note: the daemon would not start on this machine: {error}\n")
    sys.stderr.writelines(f"note: {remark}\n" for remark in config.remarks(chosen))
    sys.stderr.writelines(f"warning: {exposure}\n" for exposure in config.exposures(chosen))
    sys.stdout.write(f"{arguments.file}: ok\nsocket: {printable(str(chosen.server.socket))}\n")
    return EXIT_OK


def config_show(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cli.report import config_text

    sys.stdout.write(config_text(_load(arguments)))
    return EXIT_OK


def doctor(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cli.doctor import doctor as examine_host

    return examine_host(arguments, lambda: _load(arguments))


def demo(arguments: argparse.Namespace) -> int:
    from kvoffloadd.demo.main import demo as run_demo

    if arguments.turns < 2:
        return complain("--turns must be at least 2, because one turn is interrupted", EXIT_USAGE)
    arguments.memory = parse_bytes(arguments.memory)
    if arguments.memory < DEMO_BYTES_MIN:
        return complain(
            f"--memory must be at least {format_bytes(DEMO_BYTES_MIN)}, or the chat is not held"
            f"{missing_unit(arguments.memory, DEMO_BYTES_MIN, BYTES_MAX)}",
            EXIT_USAGE,
        )
    return run_demo(arguments)


def bench(arguments: argparse.Namespace) -> int:
    from kvoffloadd.bench.main import bench as run_bench
    from kvoffloadd.linux.memorylimits import available_memory

    arguments.bytes = parse_bytes(arguments.bytes)
    available, source = available_memory()
    if set(arguments.only) != {"requests"} and BENCH_JOBS * arguments.bytes > available:
        raise errors.ConfigError(
            f"--bytes {format_bytes(arguments.bytes)}: the benchmark takes {BENCH_JOBS} times as much memory, and only "
            f"{format_bytes(available)} are available ({source})"
        )
    return run_bench(arguments)


def flags(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cli.flags import print_flags

    print_flags(arguments)
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


def plan(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cli.plan import plan_json, print_plan
    from kvoffloadd.cli.sglangplan import print_sglang_plan, sglang_plan_json
    from kvoffloadd.planner import PAGE_TOKENS, PlanInputs, make_plan, make_sglang_plan, read_model, read_trace

    terms: dict[str, Any] = {name: getattr(arguments, name) for name in PLAN_TERMS}
    sizes = {"memory_bytes": arguments.memory, "disk_bytes": arguments.disk, "gpu_cache_bytes": arguments.gpu_cache}
    terms |= {name: parse_bytes(size) for name, size in sizes.items() if size is not None}
    if arguments.block_size is not None:
        terms["block_size"] = arguments.block_size
    if arguments.gpu_cache is not None and arguments.engine != "sglang":
        raise errors.ConfigError("--gpu-cache needs --engine sglang")
    model = read_model(arguments.model_config)
    trace = read_trace(arguments.trace, arguments.trace_block_tokens) if arguments.trace else None
    if arguments.engine == "sglang":
        sglang = make_sglang_plan(model, PlanInputs(**{"block_size": PAGE_TOKENS} | terms), trace)
        _show(arguments, lambda: sglang_plan_json(sglang), lambda: print_sglang_plan(sglang))
    else:
        plan = make_plan(model, PlanInputs(**terms), trace)
        _show(arguments, lambda: plan_json(plan), lambda: print_plan(plan))
    return EXIT_OK


def advise(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cli.advise import print_sizing, size_trace, sizing_json

    sizing = size_trace(arguments)
    _show(arguments, lambda: sizing_json(sizing), lambda: print_sizing(sizing))
    return EXIT_OK if sizing.today.hit_ratio is not None else EXIT_BAD_NEWS


def _show(arguments: argparse.Namespace, as_json: Callable[[], dict[str, Any]], for_people: Callable[[], None]) -> None:
    if arguments.json:
        _print_json(as_json())
    else:
        for_people()


# --- questions and orders to a running daemon -------------------------------------------------------


def status(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cli.status import chosen_sections, print_sections, print_summary

    with _client(arguments) as daemon:
        status = daemon.status()
    chosen = chosen_sections(status, arguments.sections) if arguments.sections and not arguments.all else status
    if arguments.json:
        _print_json(chosen)
    elif arguments.sections or arguments.all:
        print_sections(chosen)
    else:
        print_summary(status)
    return EXIT_OK


def top(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cli.top.screen import Screen

    screen = Screen(arguments.socket, arguments.interval, arguments.json, arguments.svg)
    interrupt_command()  # or the terminal would stay as the screen has set it
    # Only a person at a terminal waits for changes, and a program that reads one JSON object after the other.
    screen.run() if not arguments.once and (arguments.json or sys.stdout.isatty()) else screen.once()
    return EXIT_OK


def verify(arguments: argparse.Namespace) -> int:
    if arguments.repair and not (arguments.disk or arguments.root):
        return complain("--repair needs --disk or --root: only bad records on disk can be dropped", EXIT_USAGE)
    if arguments.root and arguments.payloads:
        return complain("--payloads needs a daemon, and --root works without one: choose one of them", EXIT_USAGE)
    return _verify_roots(arguments) if arguments.root else _verify_daemon(arguments)


def _verify_daemon(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cli.report import ProgressLine
    from kvoffloadd.log import printable

    deadline_s = VERIFY_DEADLINE_S if arguments.payloads else None
    if arguments.disk:
        deadline_s = VERIFY_DISK_DEADLINE_S
    with _client(arguments) as daemon, ProgressLine("the daemon checks itself"):
        verified = daemon.verify(
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
        sys.stdout.write(f"{_counted(len(findings), 'finding')}{dropped} in {verified.slots:,} slots{hashed}{read}\n")
    return EXIT_BAD_NEWS if len(findings) > repaired else EXIT_OK


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"


def _verify_roots(arguments: argparse.Namespace) -> int:
    """Verifies roots without a daemon. A root that can't be checked does not exclude the others."""
    from kvoffloadd.cli.report import ProgressLine
    from kvoffloadd.log import printable
    from kvoffloadd.storage.disk.repair import check_root

    code = EXIT_OK
    checked: list[dict[str, object]] = []
    for root in arguments.root:
        try:
            with ProgressLine(f"{root}") as line:
                report = check_root(root, repair=arguments.repair, progress=line.update)
        except (errors.KvOffloadError, OSError) as error:
            code = complain(f"{root} can't be checked: {error}", EXIT_REFUSED)
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
                f"{root}: {_counted(len(report.findings), 'finding')}{repaired} in {report.records:,} records, "
                f"{report.segments:,} segments, {format_bytes(report.bytes)}\n"
            )
    if arguments.json:
        _print_json({"roots": checked})
    return code


def clear(arguments: argparse.Namespace) -> int:
    pattern, uid = arguments.namespace, arguments.user
    is_everything = pattern is None and uid is None
    which = "every namespace" if pattern is None else f"the namespaces that match {pattern!r}"
    which += "" if uid is None else f" of uid {uid}"
    with _client(arguments) as daemon:
        if not arguments.yes and not _confirmed(f"Drop every key of {which} from the daemon at {daemon.socket_path}?"):
            return complain("nothing was dropped: use --yes, or answer yes at a terminal", EXIT_USAGE)
        # A worker clears only its namespace, through the library.
        cleared = daemon.clear(everything=is_everything, namespaces=pattern, uid=uid)
    scope = "" if is_everything else f" of {_counted(cleared.namespaces, 'namespace')}"
    sys.stdout.write(f"dropped {cleared.keys:,} keys, {format_bytes(cleared.bytes)}{scope}\n")
    if cleared.unrecorded:
        from kvoffloadd.log import printable

        places = ", ".join(map(printable, cleared.unrecorded))
        sys.stdout.write(f"not recorded yet in {places}: the daemon goes on trying, see `kvoffloadd status clears`\n")
    if cleared.left:
        return complain(
            f"{_counted(cleared.left, 'namespace')} could not be cleared, because others have taken all groups "
            "that the daemon can have: ask again",
            EXIT_BAD_NEWS,
        )
    return EXIT_OK


def retained(arguments: argparse.Namespace) -> int:
    from msgspec.structs import asdict

    from kvoffloadd.cli.status import print_sections

    with _client(arguments) as daemon:
        claims = [asdict(claim) for claim in sorted(daemon.claims(), key=lambda claim: claim.left_s)]
    _show(arguments, lambda: {"claims": claims}, lambda: print_sections({"claims": claims}))
    return EXIT_OK


def retain(arguments: argparse.Namespace) -> int:
    with _client(arguments) as daemon:
        which = {"name": arguments.name, "number": arguments.number}
        changed = daemon.retain({}, arguments.seconds, priority=arguments.priority, **which)
    until = format_seconds(arguments.seconds)
    sys.stdout.write(f"{_counted(changed.claims, 'claim')} with {changed.keys:,} keys: {until} from now\n")
    return EXIT_OK


def forget(arguments: argparse.Namespace) -> int:
    with _client(arguments) as daemon:
        ended = daemon.forget(arguments.name, arguments.number)
    sys.stdout.write(f"ended {_counted(ended.claims, 'claim')} with {ended.keys:,} keys\n")
    return EXIT_OK


def prefetch(arguments: argparse.Namespace) -> int:
    from kvoffloadd.cli.report import ProgressLine

    which, cursor, memory_keys = {"name": arguments.name, "number": arguments.number}, 0, 0
    with _client(arguments) as daemon, ProgressLine("prefetch", "{:,} keys".format) as line:
        while True:
            found, cursor = daemon.prefetch_claims_page(**which, cursor=cursor)
            memory_keys += found.memory_keys
            if not cursor:
                break
            line.update(cursor - 1, found.keys)
    whose = _counted(found.claims, "claim")
    sys.stdout.write(f"{whose}: {memory_keys:,} of {found.keys:,} keys are in memory\n")
    return EXIT_OK if memory_keys else EXIT_BAD_NEWS


def drain(arguments: argparse.Namespace) -> int:
    with _client(arguments) as daemon:
        drained = daemon.drain(deadline_s=arguments.deadline_s, everything=True)
    if drained.jobs or drained.unsealed:
        sys.stdout.write(f"deadline passed: {drained.jobs:,} jobs still run, {drained.unsealed:,} slots unsealed\n")
        return EXIT_BAD_NEWS
    sys.stdout.write("drained: all jobs have ended, and all stored payloads are sealed\n")
    return EXIT_OK


def _client(arguments: argparse.Namespace) -> client.Client:
    # A single attempt: an operator wants to know immediately that no daemon is there.
    return client.Client(arguments.socket, namespace=None, role="observer", connect_deadline_s=0)


def _confirmed(question: str) -> bool:
    """Returns whether a user at a terminal confirmed."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, default=_jsonable) + "\n")


def _jsonable(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
