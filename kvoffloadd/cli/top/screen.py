"""The loop of `kvoffloadd top`: query, derive, show, wait; continues whatever happens to the daemon."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live

from kvoffloadd.cli.interrupts import raise_if_interrupted
from kvoffloadd.cli.report import PIPE_COLUMNS, open_console
from kvoffloadd.cli.top.frame import History, figures
from kvoffloadd.cli.top.view import render
from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError, ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

ANSWER_S = 5.0
TITLE = "kvoffloadd top"


@dataclass(slots=True)
class Screen:
    """The options of the command line, and the state so far."""

    socket: Path | None
    interval_s: float
    as_json: bool = False
    svg: Path | None = None
    history: History = field(default_factory=History)
    shown: dict[str, Any] | None = None
    waiting: str = ""

    def once(self) -> None:
        """Queries twice, so that there are rates, and prints one picture. Raises ClientError, and as `run`."""
        with self._client() as client:
            self._look(client)
            time.sleep(self.interval_s)
            self._look(client)
        self._print()

    def run(self) -> None:
        """Runs until q, Ctrl-C or the end of the terminal. Raises ConfigError if the picture can't be written, and
        ClientError if there are no JSON objects to begin with.
        """
        client = self._client()
        try:
            if self.as_json:
                self._print_for_ever(client)
            else:
                self._show_for_ever(client)
        except KeyboardInterrupt:
            pass
        finally:
            client.close(force=True)
            if self.svg is not None:
                self._draw(self.svg)

    def _client(self) -> Client:
        return Client(self.socket, namespace=None, role="observer", deadline_s=ANSWER_S, connect_deadline_s=0)

    def _look(self, client: Client) -> None:
        """Queries the daemon. Raises ClientError."""
        status = client.status()
        self.history.add(time.monotonic(), status)
        self.shown, self.waiting = figures(self.history), ""

    def _try(self, client: Client) -> None:
        """Queries a daemon that may be gone or not answer, and may return."""
        try:
            self._look(client)
        except ClientError as error:
            self.history.miss()
            self.waiting = f"for the daemon: {error}"

    def _print_for_ever(self, client: Client) -> None:
        self._look(client)
        reported = ""
        while True:
            if not self.waiting:
                self._print()
            elif self.waiting != reported:
                sys.stderr.write(f"kvoffloadd: waiting {self.waiting}\n")
            reported = self.waiting
            raise_if_interrupted()
            time.sleep(self.interval_s)
            self._try(client)

    def _show_for_ever(self, client: Client) -> None:
        console = open_console()
        with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                due = time.monotonic() + self.interval_s
                self._try(client)
                live.update(self._picture(console.width), refresh=True)
                raise_if_interrupted()
                if _quit_within(max(due - time.monotonic(), 0.05)):
                    return

    def _print(self) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps(self.shown, sort_keys=True) + "\n")
            sys.stdout.flush()
            return
        console = open_console()
        console.print(self._picture(console.width))
        if self.svg is not None:
            self._draw(self.svg)

    def _picture(self, width: int) -> RenderableType:
        return render(self.shown, self.history.rates, width, self.waiting)

    def _draw(self, path: Path) -> None:
        """Draws the last figures, in the terminal's width."""
        with open("/dev/null", "w", encoding="utf-8") as nowhere:
            width = Console().width if sys.stdout.isatty() else PIPE_COLUMNS
            console = Console(
                record=True, width=width, file=nowhere, markup=False, highlight=False, emoji=False,
                force_terminal=True, color_system="truecolor",
            )  # fmt: skip
            console.print(self._picture(console.width))
            try:
                console.save_svg(str(path), title=TITLE)
            except OSError as error:
                raise ConfigError(f"--svg {path}: {error.strerror}") from None


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Delivers keys at once, without echo, within the context."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quit_within(seconds: float) -> bool:
    """Returns whether q was pressed within this time."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q", "")
