"""Checks the remote tier: the interpreter that runs the agent, the store's client, and whether the store can be
reached.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvoffloadd import __version__
from kvoffloadd.agentwire.storeurl import split_store_url
from kvoffloadd.config import Config, ValkeyConfig
from kvoffloadd.doctor.diagnosis import Diagnosis, note, ok, problem
from kvoffloadd.doctor.host import Host
from kvoffloadd.storage.remote.agentprocess import agent_command, agent_environment

START_S = 60.0
"""An interpreter that imports a store's client from a cold disk takes some seconds."""
CONNECT_S = 3.0

_IMPORTS = {
    "mooncake": "import mooncake.store, kvoffloadd.agent.engines.mooncake",
    "valkey": "import kvoffloadd.agent.engines.valkey",
    "memory": "import kvoffloadd.agent.engines.memory",
}


def check_remote(config: Config, host: Host) -> Iterator[Diagnosis]:
    """Checks the remote tier without starting an agent, which would join the store."""
    engine = config.remote.engine
    if not engine:
        yield ok("remote tier", "none: remote.engine is empty")
        return
    yield _check_interpreter(config, host)
    if engine == "valkey":
        yield from _check_files(config.valkey, host)
    yield from _check_reached(config)


def _check_interpreter(config: Config, host: Host) -> Diagnosis:
    subject, python = "agent", config.remote.python
    extra = "[remote-mooncake]" if config.remote.engine == "mooncake" else ""
    remedy = f"in a checkout of {__version__}: {python or 'python'} -m pip install '.{extra}'"
    if config.remote.engine == "mooncake":
        remedy += ", and libibverbs (Debian: libibverbs1)"
    command = agent_command(python)
    program = f"{_IMPORTS[config.remote.engine]}; import kvoffloadd; print(kvoffloadd.__version__)"
    try:
        done = subprocess.run(
            [command[0], "-P", "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env=agent_environment(python, host.environment), timeout=START_S, check=False,
        )  # fmt: skip
    except OSError as error:
        return problem(
            subject,
            f"remote.python = {python!r}: {error.strerror}",
            "set the absolute path of an interpreter, or leave it empty",
        )
    except subprocess.TimeoutExpired:
        return problem(
            subject, f"{command[0]} does not start within {START_S:.0f} s", "check its disk and its packages"
        )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return problem(subject, f"{command[0]}: {reason}", remedy)
    version = (done.stdout.split() or [""])[-1]
    if version != __version__:
        return problem(subject, f"{command[0]} has kvoffloadd {version}, the daemon is {__version__}", remedy)
    return ok(subject, f"{command[0]} has what {config.remote.engine} needs")


def _check_files(valkey: ValkeyConfig, host: Host) -> Iterator[Diagnosis]:
    for key in ("password_file", "ca_file", "cert_file", "key_file"):
        path = getattr(valkey, key)
        if not path:
            continue
        try:
            with open(path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        except OSError as error:
            yield problem(f"valkey.{key}", f"{path}: {error.strerror}", f"make it readable for uid {host.uid}")
            continue
        if key in ("password_file", "key_file") and mode & 0o077:
            yield note(f"valkey.{key}", f"{path} has mode {mode:o}: others may read it", f"chmod 600 {path}")
        else:
            yield ok(f"valkey.{key}", f"{path} can be read")


def _check_reached(config: Config) -> Iterator[Diagnosis]:
    place = _place(config)
    if place is None:
        return
    shown = place if isinstance(place, str) else f"{place[0]}:{place[1]}"
    try:
        _connect(place)
    except OSError as error:
        yield problem(
            "remote store", f"{shown}: {error.strerror or error}", "start the store; check its address and the firewall"
        )
    else:
        yield ok("remote store", f"{shown} accepts connections")


def _place(config: Config) -> tuple[str, int] | str | None:
    """Returns where the store listens: host and port, or a path. None: the config does not show it."""
    if config.remote.engine == "memory":
        return None
    if config.remote.engine == "mooncake":
        if "://" in config.mooncake.master:
            return None
        address, _, port = config.mooncake.master.rpartition(":")
        return (address.strip("[]"), int(port)) if port.isdigit() else None
    url = split_store_url(config.valkey.url)
    return url.path or (url.host, url.port)


def _connect(place: tuple[str, int] | str) -> None:
    """Connects. Raises OSError if no process listens there."""
    if isinstance(place, str):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(CONNECT_S)
            sock.connect(str(Path(place)))
    else:
        socket.create_connection(place, CONNECT_S).close()
