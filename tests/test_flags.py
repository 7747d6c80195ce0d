"""`kvoffloadd flags` prints a command that a shell takes, with what the adapters accept."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd import socketpath
from kvoffloadd.integrations.sglang.flags import completed
from kvoffloadd.integrations.sglang.options import StorageOptions
from kvoffloadd.integrations.vllm.config import Options
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.published import CONFIGS

MODELS = Path(__file__).parent / "planner" / "data"
VLLM = {"kv_connector": "KVOffloaddConnector", "kv_role": "kv_both"}
STORAGE = {"module_path": "kvoffloadd.integrations.sglang", "class_name": "KVOffloaddStorage"}


def flags(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvoffloadd", "flags", *words],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def printed(*words: str, **environment: str) -> list[str]:
    """The words of the command, as a shell splits what is printed."""
    done = flags(*words, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.count("\n") == 1
    script = f'set -- {done.stdout.strip()}\nfor word in "$@"; do printf "%s\\0" "$word"; done'
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=HANG_S)
    found = shell.stdout.split("\0")[:-1]
    assert found == shlex.split(done.stdout)
    return found


def given(command: list[str], option: str) -> Any:
    return json.loads(command[command.index(option) + 1])


def storage_of(command: list[str]) -> tuple[dict[str, Any], StorageOptions]:
    """The configuration of SGLang's storage that is printed, and the options that the storage reads of it."""
    config = given(command, "--hicache-storage-backend-extra-config")
    arguments = {
        "hicache_storage_backend": command[command.index("--hicache-storage-backend") + 1],
        "hicache_storage_backend_extra_config": json.dumps(config),
        "hicache_mem_layout": "page_first",
    }
    whole = completed(arguments)  # what the plug-in makes of it
    assert whole["hicache_mem_layout"] == "page_first_direct"
    return config, StorageOptions.of(json.loads(whole["hicache_storage_backend_extra_config"]))


def test_vllm() -> None:
    assert printed("vllm") == [
        "vllm",
        "serve",
        "MODEL",
        "--kv-transfer-config",
        json.dumps(VLLM, separators=(",", ":")),
    ]


def test_sglang() -> None:
    command = printed("sglang")
    assert command[:7] == ["python", "-m", "sglang.launch_server", "--model-path", "MODEL", "--page-size", "64"]
    assert "--enable-hierarchical-cache" in command
    config, options = storage_of(command)
    assert config == STORAGE
    assert options.socket is None


@pytest.mark.parametrize("path", ["/srv/d.sock", "/srv/it's $HOME/\"a\\b.sock", "/srv/π `x`.sock"])
def test_a_socket_that_engines_do_not_find(path: str) -> None:
    """It is in the command, whether it was named here or in this shell's variable."""
    for command in (printed("vllm", "--socket", path), printed("vllm", **{socketpath.VARIABLE: path})):
        config = given(command, "--kv-transfer-config")
        assert config == VLLM | {"kv_connector_extra_config": {"socket": path}}
        assert Options.of(config["kv_connector_extra_config"]).socket == path
    config, options = storage_of(printed("sglang", "--socket", path))
    assert config == STORAGE | {"socket": path}
    assert options.socket == path


def test_a_socket_that_engines_find() -> None:
    own = str(socketpath.own_socket(os.environ, os.geteuid()))
    assert printed("vllm", "--socket", own) == printed("vllm") == printed("vllm", **{socketpath.VARIABLE: own})
    relative = given(printed("vllm", "--socket", "d.sock"), "--kv-transfer-config")
    assert relative["kv_connector_extra_config"] == {"socket": str(Path.cwd() / "d.sock")}
    done = flags("vllm", "--socket", "/" + 107 * "x")
    assert (done.returncode, "may have at most 107" in done.stderr) == (2, True)


def test_a_model(tmp_path: Path) -> None:
    config = tmp_path / "a model" / "config.json"
    config.parent.mkdir()
    config.write_bytes((MODELS / "llama-3.1-8b.json").read_bytes())
    assert printed("vllm", "--model-config", str(config)) == printed("vllm")
    (config.parent / "model-00001.safetensors").touch()
    assert printed("vllm", "--model-config", str(config))[2] == str(config.parent)
    command = printed("sglang", "--model-config", str(config))
    assert command[command.index("--model-path") + 1] == str(config.parent)
    config.write_text(json.dumps(CONFIGS["deepseek-v4-flash"]))
    refused = flags("sglang", "--model-config", str(config))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no plan: " in refused.stderr
    for engine in ("vllm", "sglang"):
        missing = flags(engine, "--model-config", str(tmp_path / "none.json"))
        assert (missing.returncode, str(tmp_path / "none.json") in missing.stderr) == (2, True)


def test_a_model_whose_pages_have_one_token(tmp_path: Path) -> None:
    """SGLang caches its prompts with no other size, as the plan knows."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["lfm2-1.2b"]))
    command = printed("sglang", "--model-config", str(config))
    assert command[command.index("--page-size") + 1] == "1"


def test_an_engine_that_is_not_known() -> None:
    done = flags("triton")
    assert (done.returncode, "known are vllm, sglang" in done.stderr) == (2, True)
