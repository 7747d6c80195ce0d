"""The command `kvoffloadd flags`: prints the command that starts an engine with the daemon, ready to be copied."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from kvoffloadd import checks, socketpath
from kvoffloadd.errors import ConfigError
from kvoffloadd.integrations.vllm.plugin import CONNECTOR
from kvoffloadd.planner import PAGE_TOKENS, PlanInputs, make_sglang_plan, read_model
from kvoffloadd.sglangnames import STORAGE_CLASS, STORAGE_FLAG

_MODEL = "MODEL"
"""The word that stands for a model whose place is not known."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def print_flags(arguments: argparse.Namespace) -> None:
    """Prints one line. Raises ConfigError for a bad path, and as `read_model`."""
    config: Path | None = arguments.model_config
    options = {} if (socket := _socket(arguments.socket)) is None else {"socket": str(socket)}
    words = _sglang(config, options) if arguments.engine == "sglang" else _vllm(config, options)
    sys.stdout.write(f"{shlex.join(words)}\n")


def _vllm(config: Path | None, options: dict[str, str]) -> list[str]:
    transfer: dict[str, object] = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    if options:
        transfer["kv_connector_extra_config"] = options
    return ["vllm", "serve", _model(config), "--kv-transfer-config", _json(transfer)]


def _sglang(config: Path | None, options: dict[str, str]) -> list[str]:
    chosen: tuple[str, ...] = ("--page-size", str(PAGE_TOKENS))
    if config is not None:
        chosen = make_sglang_plan(read_model(config), PlanInputs(block_size=PAGE_TOKENS)).model_flags
    return [
        *("python", "-m", "sglang.launch_server", "--model-path", _model(config), *chosen),
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"),
        *(STORAGE_FLAG, _json(STORAGE_CLASS | options)),
    ]


def _model(config: Path | None) -> str:
    """Returns the directory of the model, if its weights are beside its config."""
    if config is None:
        return _MODEL
    if not config.is_file():
        raise ConfigError(f"{config}: is not a file")
    folder = config.absolute().parent
    return str(folder) if any(any(folder.glob(pattern)) for pattern in _WEIGHTS) else _MODEL


def _socket(given: Path | None) -> Path | None:
    """Returns the socket that the engine must be given; None: it finds the daemon itself. A path that only this shell's
    variable names counts as not found, since the engine may be started from another one.
    """
    try:
        path = socketpath.named_socket(os.environ) if given is None else checks.socket_path(str(given))
    except ValueError as error:
        raise ConfigError(str(error) if given is None else f"--socket {given}: {error}") from None
    return None if path == socketpath.own_socket(os.environ, os.geteuid()) else path


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
