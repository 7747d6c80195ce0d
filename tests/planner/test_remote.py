"""`kvoffloadd plan --remote`: what a store that hosts share means for a model."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from kvoffloadd import checks, cli, config
from kvoffloadd.agent.engines import valkey
from kvoffloadd.config import RemoteConfig
from kvoffloadd.errors import ConfigError
from kvoffloadd.planner import RemoteTerms, make_remote_plan, remote
from tests.planner.models import DATA, GEMMA_3, GIB, LLAMA, example_of, path_of, plan

DOCUMENT = Path(__file__).parents[2] / "docs" / "PLANNING.md"


def test_by_hand() -> None:
    """Llama 3.1 8B: 32 layers, 8 heads of 128, bfloat16: 128 KiB a token."""
    made = plan(LLAMA, block_size=16, tp=4, prompt_tokens=8000, memory_bytes=64 * GIB)
    found = make_remote_plan(made, RemoteTerms("valkey", 100 * GIB, 1 << 30, 5000))
    key = 16 * (128 << 10) + 4096
    assert found.object_bytes == (key,)
    (prompt,) = found.prompts
    assert (prompt.asked, prompt.objects, prompt.fetch_bytes) == (500, 500, 500 * key)
    assert prompt.fetch_s == 500 * key / (1 << 30)
    assert prompt.prefill_s == 8000 / 5000
    assert prompt.break_even_bytes_per_s == pytest.approx(500 * key / 1.6)
    assert found.tokens == int(0.95 * 100 * GIB) // key * 16
    assert found.held == (int(0.95 * 100 * GIB) // (500 * key),)
    assert (found.settings, found.warnings) == ({}, ())


def test_windows_need_less_than_is_asked_for() -> None:
    made = plan(GEMMA_3, block_size=64, tp=2, memory_bytes=64 * GIB)
    (prompt,) = make_remote_plan(made, RemoteTerms("mooncake")).prompts
    assert (prompt.asked, prompt.objects) == (875, 221)
    assert prompt.fetch_bytes == made.prompts[0].needed_bytes + 221 * 4096


@pytest.mark.slow
def test_settings_where_defaults_would_not_do() -> None:
    made = plan(LLAMA, prompt_tokens=40_000, memory_bytes=64 * GIB)
    found = make_remote_plan(made, RemoteTerms("mooncake", link_bytes_per_s=1 << 30, prefill_tokens_per_s=1000))
    assert found.settings == {"lookup_keys": 2500, "fetch_s": 8.0, "prefetch_s": 15.0}
    assert not found.warnings


@pytest.mark.slow
def test_warnings() -> None:
    small = plan(LLAMA, prompt_tokens=100_000, memory_bytes=64 << 20)
    found = make_remote_plan(small, RemoteTerms("mooncake", 32 << 20, 64 << 20, 1_000_000))
    for words in ("never shared", "may find no room", "longer blocks", "computing is faster"):
        assert any(words in warning for warning in found.warnings), words
    assert "fetch_s" not in found.settings, "nobody is to wait for it"


@pytest.mark.parametrize("engine", ["mooncake", "valkey"])
@pytest.mark.parametrize("name", [path.stem for path in DATA.glob("*.json")])
def test_the_config_is_one(name: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines are a config that is accepted, and the tables fit 100 columns."""
    made = plan(name, tp=2, prompt_tokens=60_000, memory_bytes=64 * GIB)
    found = make_remote_plan(made, RemoteTerms(engine, link_bytes_per_s=1 << 30, prefill_tokens_per_s=100))
    path = tmp_path / "kvoffloadd.toml"
    path.write_text("\n".join(remote.config_lines(found)) + f'\n[memory]\ncapacity_bytes = "{64}GiB"\n')
    chosen = config.load(path)
    assert chosen.remote.engine == engine
    assert set(tomllib.loads(path.read_text())["remote"]) == {"engine", *found.settings}
    assert cli.main(["plan", "--model-config", str(path_of(name)), "--remote", engine]) == 0
    said = capsys.readouterr().out
    assert "a prompt from" in said
    assert max(map(len, said.splitlines())) <= 100


def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--remote", "valkey", "--remote-size", "1TiB", "--link-rate", "11GiB", "--prefill-rate", "20000", "--json"]
    assert cli.main(["plan", "--model-config", str(path_of(LLAMA)), *words]) == 0
    found = json.loads(capsys.readouterr().out)["remote"]
    assert (found["engine"], found["store_bytes"], found["link_bytes_per_s"]) == ("valkey", 1 << 40, 11 << 30)
    assert found["prompts"][0]["prefill_s"] == 0.4
    assert found["config"][:2] == ["[remote]", 'engine = "valkey"']


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--link-rate", "3GiB"], "need --remote"),
        (["--remote", "valkey", "--engine", "sglang"], "leave out --engine sglang"),
        (["--remote", "valkey", "--link-rate", "0"], "above 0"),
    ],
)
def test_wrong_usage(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model-config", str(path_of(LLAMA)), *words]) == 2
    assert complaint in capsys.readouterr().err


def test_too_many_parts() -> None:
    made = plan(LLAMA, tp=8)
    object.__setattr__(made, "parts", (200,))
    with pytest.raises(ConfigError, match="200 parts"):
        make_remote_plan(made, RemoteTerms("valkey"))


def test_constants_are_the_daemons() -> None:
    assert remote.OBJECT_SHARE["valkey"] == 1 / valkey._SHARE_MAX
    assert remote.DEFAULTS.lookup_keys == RemoteConfig().lookup_keys
    with pytest.raises(ValueError, match="4096"):
        checks.count(1, remote.LOOKUP_KEYS_MAX)(remote.LOOKUP_KEYS_MAX + 1)


def test_the_example_is_real(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    section = DOCUMENT.read_text(encoding="utf-8").split("## A store that hosts share\n")[1].split("\n| figure")[0]
    arguments, shown = example_of(section)
    monkeypatch.chdir(DOCUMENT.parents[1])
    assert cli.main(arguments) == 0
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    begin = next(at for at, line in enumerate(said) if line.startswith("a prompt from"))
    end = next(at for at, line in enumerate(said) if line.startswith("assumed of the remote store"))
    assert shown == said[begin : end - 1]
