"""The child of `enginechild.EngineChild`: it obeys one JSON command a line, and answers each with one line."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, TextIO

Answer = dict[str, Any]


def _commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _answered(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  the parent gets the error, whatever it is
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def serve(make: Callable[[dict[str, Any]], Any], options: dict[str, Any], answers: TextIO) -> int:
    """Serve until the end of the input."""
    served: list[Any] = []

    def say(answer: Answer) -> Answer:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        return answer

    def start() -> Answer:
        served.append(make(options))
        return {}

    if "error" in say(_answered(start)):
        return 1
    with suppress(BrokenPipeError):
        for command in _commands():
            method = getattr(served[0], command.pop("do"))
            say(_answered(lambda method=method, command=command: method(**command)))  # type: ignore[misc]
        served[0].shutdown()
    return 0


def main(make: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """`make(options)` -> an object whose public methods are the commands, by name; `shutdown` among them, for the end.

    Does not return.
    """
    os.nice(10)  # ranks spin while they wait for each other: on a machine with as few processors the daemon goes first
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as stream:
        status = serve(make, json.loads(sys.argv[1]), stream)
        # Not by way of the interpreter: torch's threads can hang there, which is not what is tested here.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
