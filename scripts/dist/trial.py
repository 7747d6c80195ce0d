"""Installs a package as a user would, in a bare venv and away from the checkout, and uses it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvoffloadd.testing.wait import HANG_S, until
from scripts.dist.interpreters import Interpreter
from scripts.dist.packages import without_settings

INSTALL_S, DEMO_S, COMMAND_S = 10 * HANG_S, 5 * HANG_S, 2 * HANG_S
DEMO = ("demo", "--turns", "24", "--memory", "64MiB")
"""A tenth of the turns: every part of the demo, in some seconds."""
GENERATED = (("man",), ("completion", "bash"), ("completion", "zsh"), ("completion", "fish"))
"""Commands that print a file of the package."""
_HELPER = "import kvoffloadd.native.loader as it; print(it.__file__, it.HELPER is not None)"


class TrialError(Exception):
    """A step of the trial failed; the message has its name and its output."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to install. `has_helper`: whether the C helper must be there afterwards."""

    name: str
    from_source: bool
    has_helper: bool
    variables: Mapping[str, str]


KINDS = (
    Kind("wheel", False, True, {}),
    Kind("source, compiler", True, True, {}),
    Kind("source, none", True, False, {"CC": "false"}),
)
"""`CC=false` is a machine without a compiler."""


def user_environment(kind: Kind) -> dict[str, str]:
    """Returns this process's variables as a user would have them."""
    return without_settings(os.environ) | dict(kind.variables)


class Trial:
    """One package, one interpreter. `folder`: is empty, and takes the venv and all that the commands write."""

    def __init__(self, interpreter: Interpreter, kind: Kind, folder: Path) -> None:
        self._interpreter = interpreter
        self._kind = kind
        self._folder = folder
        self._bin = folder / "venv" / "bin"

    def run(self, package: Path, version: str, constraints: Path | None) -> None:
        """Goes through all steps. Raises TrialError."""
        self._step("venv", str(self._interpreter.path), "-m", "venv", str(self._bin.parent), limit_s=INSTALL_S)
        python = str(self._bin / "python")
        pip = [python, "-m", "pip", "--no-input", "--disable-pip-version-check", "install", "--quiet"]
        within = ["--constraint", str(constraints)] if constraints else []
        self._step("pip install", *pip, *within, str(package), limit_s=INSTALL_S)
        self._check_helper()
        told = self._kvoffloadd("--version")
        if told != f"kvoffloadd {version}":
            raise TrialError(f"--version: {told!r}, not {version}")
        for command in GENERATED:
            if not self._kvoffloadd(*command):
                raise TrialError(f"{' '.join(command)}: prints nothing")
        self._kvoffloadd(*DEMO, limit_s=DEMO_S)
        self._serve_and_ask()

    def _check_helper(self) -> None:
        """Also checks that what is imported is what was installed."""
        words = self._step("import", str(self._bin / "python"), "-c", _HELPER, limit_s=COMMAND_S).split()
        if len(words) != 2 or self._folder.resolve() not in Path(words[0]).resolve().parents:
            raise TrialError(f"import: not from the venv: {words}")
        if words[1] != str(self._kind.has_helper):
            raise TrialError(f"the C helper is {'missing' if self._kind.has_helper else 'there without a compiler'}")

    def _serve_and_ask(self) -> None:
        socket, log = self._folder / "socket", self._folder / "log"
        with log.open("wb") as stream:
            daemon = subprocess.Popen(
                [str(self._bin / "kvoffloadd"), "serve", "--memory", "64MiB", "--socket", str(socket)],
                cwd=self._folder, env=user_environment(self._kind), stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            try:
                until(
                    lambda: b"serving at" in log.read_bytes() or daemon.poll() is not None, "serving", COMMAND_S,
                    every_s=0.05,
                )  # fmt: skip
                status = json.loads(self._kvoffloadd("status", "--socket", str(socket), "--json"))
            except (TimeoutError, TrialError) as error:
                raise TrialError(f"serve: {error}\n{log.read_text(errors='replace')[-2000:]}") from None
            if status["pid"] != daemon.pid:
                raise TrialError(f"status: of process {status['pid']}, not of {daemon.pid}")
            daemon.terminate()
            until(lambda: daemon.poll() is not None, "the end", COMMAND_S, every_s=0.05)
            if daemon.returncode:
                raise TrialError(f"serve: ended with {daemon.returncode}\n{log.read_text(errors='replace')[-2000:]}")
        finally:
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()

    def _kvoffloadd(self, *words: str, limit_s: float = COMMAND_S) -> str:
        return self._step(words[0], str(self._bin / "kvoffloadd"), *words, limit_s=limit_s)

    def _step(self, name: str, *command: str, limit_s: float) -> str:
        """Returns its standard output."""
        try:
            done = subprocess.run(
                command, cwd=self._folder, env=user_environment(self._kind), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, check=False, timeout=limit_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TrialError(f"{name}: hangs, after {limit_s:.0f} s") from None
        if done.returncode:
            raise TrialError(f"{name}: status {done.returncode}\n{(done.stdout + done.stderr).strip()[-2000:]}")
        return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a trial. `problem` is empty if all went well."""

    interpreter: Interpreter
    kind: Kind
    seconds: float
    problem: str


def try_out(
    interpreter: Interpreter, kind: Kind, package: Path, version: str, constraints: Path | None, folder: Path
) -> Outcome:
    """Runs a trial in `folder`."""
    began = time.monotonic()
    problem = ""
    try:
        Trial(interpreter, kind, folder).run(package, version, constraints)
    except (TrialError, OSError) as error:  # also a TimeoutError
        problem = str(error)
    return Outcome(interpreter, kind, time.monotonic() - began, problem)
