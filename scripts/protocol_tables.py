"""The message tables of docs/PROTOCOL.md, from the code: prints them, or with --write puts them into the document."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvoffloadd import errors
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.state import CLIENT_MOVES, DAEMON_MOVES, ROLE_MAY, ProtocolState

DOCUMENT = Path(__file__).parent.parent / "docs" / "PROTOCOL.md"
BEGIN, END = "<!-- generated: {} -->", "<!-- end -->"
PARTS = (m.NamespaceSpec, m.TensorSpec, m.RefSpec, m.GroupSpec, m.GroupKeys, m.GroupBlocks, m.Limits)


def _int(kind: msgspec.inspect.IntType) -> str:
    high = kind.le if kind.le is not None else None if kind.lt is None else kind.lt - 1
    return f"int {kind.ge}..{_power(high)}"


def _float(kind: msgspec.inspect.FloatType) -> str:
    if kind.le is None:
        return "float"
    return f"float, {kind.ge}..{kind.le}" if kind.gt is None else f"float, above {kind.gt}, at most {kind.le}"


NAMES: dict[type[msgspec.inspect.Type], Callable[[Any], str]] = {
    msgspec.inspect.IntType: _int,
    msgspec.inspect.FloatType: _float,
    msgspec.inspect.StrType: lambda k: "str" if k.max_length is None else f"str of at most {k.max_length}",
    msgspec.inspect.BytesType: lambda k: "bin" if k.max_length is None else f"bin of {k.max_length}",
    msgspec.inspect.BoolType: lambda k: "bool",
    msgspec.inspect.NoneType: lambda k: "nil",
    msgspec.inspect.AnyType: lambda k: "any",
    msgspec.inspect.DictType: lambda k: "map",
    msgspec.inspect.LiteralType: lambda k: " or ".join(f"`{value}`" for value in k.values),
    msgspec.inspect.ListType: lambda k: f"array of {type_name(k.item_type)}",
    msgspec.inspect.StructType: lambda k: f"`{k.cls.__name__}`",
    msgspec.inspect.UnionType: lambda k: " or ".join(map(type_name, k.types)),
}


def type_name(kind: msgspec.inspect.Type) -> str:
    """A field's type, as a reader of the wire would say it."""
    return NAMES[type(kind)](kind)


def _power(value: int | None) -> str:
    if value is None:
        return ""
    exponent = (value + 1).bit_length() - 1
    return f"2^{exponent}-1" if value + 1 == 1 << exponent and exponent > 12 else str(value)


def fields_table(cls: type[Any]) -> list[str]:
    """One line per field."""
    info = msgspec.inspect.type_info(cls)
    if not isinstance(info, msgspec.inspect.StructType):
        raise TypeError(cls)
    return [f"  - `{field.encode_name}`: {type_name(field.type)}{_absence(field)}" for field in info.fields]


def _absence(field: msgspec.inspect.Field) -> str:
    """What it means that the field is not there."""
    if field.required:
        return ""
    if field.default is field.default_factory is msgspec.NODEFAULT:
        return ", or left out"
    return f", default `{_default(field)}`"


def _default(field: msgspec.inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return "[]"
    value = field.default
    return "nil" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def describe(cls: type[Any], tag: str) -> list[str]:
    """A message: its purpose, its reply, its fields."""
    text = " ".join((cls.__doc__ or "").split())
    reply = f" Reply: `{cls.reply}`." if issubclass(cls, m.Request) else ""
    return [f"- **`{tag}`**: {text}{reply}", *fields_table(cls)]


def messages(known: dict[str, type[Any]]) -> str:
    """All messages of one direction and kind."""
    return "\n".join(line for tag, cls in known.items() for line in describe(cls, tag))


def parts() -> str:
    """Maps inside messages."""
    return "\n".join(line for cls in PARTS for line in describe(cls, cls.__name__))


def states() -> str:
    """Who may say what, state by state."""
    lines = ["| state | the client may send | the daemon may send |", "|---|---|---|"]
    for state in ProtocolState:
        client = ", ".join(f"`{tag}`" + _arrow(state, to) for tag, to in CLIENT_MOVES[state].items())
        daemon = ", ".join(f"`{tag}`" + _arrow(state, to) for tag, to in DAEMON_MOVES[state].items())
        lines.append(f"| {state.name} | {client or 'nothing'} | {daemon or 'nothing'} |")
    return "\n".join(lines)


def _arrow(state: ProtocolState, to: ProtocolState) -> str:
    return "" if to is state else f" -> {to.name}"


def roles() -> str:
    """What each role may ask."""
    return "\n".join(f"- **{role}**: {', '.join(f'`{tag}`' for tag in sorted(may))}" for role, may in ROLE_MAY.items())


def codes() -> str:
    """Error codes that travel."""
    lines = ["| code | fault | retryable | ends the session | meaning |", "|---|---|---|---|---|"]
    seen = set()
    for cls in errors.all_subclasses():
        travels = issubclass(cls, (errors.PeerError, errors.ResourceError, errors.DeviceError, errors.InternalError))
        if travels and cls.code not in seen and cls not in (errors.PeerError, errors.ResourceError):
            seen.add(cls.code)
            text = " ".join((cls.__doc__ or "").split())
            yes = {True: "yes", False: "no"}
            lines.append(f"| `{cls.code}` | {cls.fault} | {yes[cls.retryable]} | {yes[cls.ends_session]} | {text} |")
    return "\n".join(lines)


SECTIONS = {
    "states": states,
    "roles": roles,
    "requests": lambda: messages(m.REQUESTS),
    "replies": lambda: messages(m.REPLIES),
    "pushes": lambda: messages(m.PUSHES),
    "parts": parts,
    "codes": codes,
}


def fill(document: str) -> str:
    """The document with all its generated sections made anew. Raises KeyError for a marker that names none."""

    def section(match: re.Match[str]) -> str:
        name = match[1]
        return f"{BEGIN.format(name)}\n{SECTIONS[name]()}\n{END}"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", section, document, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"rewrite {DOCUMENT.name} in place")
    if parser.parse_args().write:
        DOCUMENT.write_text(fill(DOCUMENT.read_text()))
    else:
        print("\n\n".join(make() for make in SECTIONS.values()))
    return 0
