"""Makes the manual page and the completions of the command line from its parser; with --write, into their files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

from kvoffloadd.cli.about import GENERATED, SHELLS
from kvoffloadd.cli.arguments import COMMANDS, CommandLine, make_parser
from kvoffloadd.cli.parser import commands_of

FILES = ("FILE", "PATH")
"""Options with these values are completed with file names."""


def command_files() -> dict[str, str]:
    """The contents of each file by its name."""
    parser = make_parser()
    return {"kvoffloadd.1": manual(parser), **{f"kvoffloadd.{shell}": completion(parser, shell) for shell in SHELLS}}


def completion(parser: CommandLine, shell: str) -> str:
    """The script for a shell."""
    for action in _actions(parser):
        if action.metavar in FILES or action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    script: str = shtab.complete(parser, shell)
    return script.rstrip("\n") + "\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from parser._actions
    for _, child in commands_of(parser):
        yield from _actions(child)


# --- the manual page ------------------------------------------------------------------------------------


def manual(parser: CommandLine) -> str:
    """The manual page in the macros of man(7). Without date and version, it changes with the commands alone."""
    lines = [
        '.TH KVOFFLOADD 1 "" kvoffloadd "User Commands"',
        ".SH NAME",
        r"kvoffloadd \- a KV\-cache offload daemon for inference engines",
        ".SH SYNOPSIS",
        r".B kvoffloadd \-\-version",
        ".br",
        r'.BI kvoffloadd " COMMAND " ...',
        ".SH DESCRIPTION",
        _text(parser.description),
    ]
    children = dict(commands_of(parser))
    for title, names in COMMANDS.items():
        lines.append(f'.SH "{_text(title).upper()}"')
        for name in names:
            lines += _command(children[name])
    exits, _, codes = (parser.epilog or "").partition(": ")
    return "\n".join([*lines, f'.SH "{exits.upper()}"', _text(codes), *_ENDING]) + "\n"


_ENDING = (
    ".SH ENVIRONMENT",
    ".TP",
    r"\fBKVOFFLOADD_SOCKET\fR",
    r"The daemon's socket: \fBserve\fR makes it there, unless an option or the config names another, and commands and",
    "engines without such an option look nowhere else.",
    ".TP",
    r"\fBKVOFFLOADD_DAEMON_UID\fR",
    "The user whose daemon commands and engines trust, besides root and their own.",
    ".SH FILES",
    ".TP",
    r"\fI/etc/kvoffloadd/kvoffloadd.toml\fR",
    r"The config file of the service, whose unit names it: \fBserve\fR reads no file without \fB\-\-config\fR.",
    "The file that the project ships explains every key.",
    ".SH SEE ALSO",
    r"The project's \fIdocs/OPERATIONS.md\fR, and its README.",
)


def _command(command: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the lines of a command and of the commands below it."""
    values = [_value(action) for action in command._actions if not action.option_strings and action.metavar]
    yield f'.SS "{_text(" ".join([command.prog, *values]))}"'
    yield _text(command.description)
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        named = ", ".join(rf"\fB{_text(option)}\fR" for option in action.option_strings)
        value = rf"\fI{_text(_value(action))}\fR" if action.nargs != 0 else ""
        yield from (".TP", " ".join(filter(None, (named, value))))
        yield _text(command._get_formatter()._expand_help(action) if action.help else "")
    for _, child in commands_of(command):
        yield from _command(child)


def _value(action: argparse.Action) -> str:
    return str(action.metavar or ("|".join(action.choices) if action.choices else action.dest.upper()))


def _text(text: str | None) -> str:
    """Escapes what would be a macro or another character."""
    escaped = (text or "").replace("\\", r"\e").replace("-", r"\-").replace('"', r"\(dq")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"rewrite the files in {GENERATED.name}/")
    write = parser.parse_args().write
    for name, text in command_files().items():
        if write:
            (GENERATED / name).write_text(text, encoding="utf-8")
        print(f"{GENERATED / name}: {len(text.splitlines())} lines")
    return 0
