"""scripts/demo.py: a short demo is clean, restores what the other worker stored, and survives both kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.running import run_script


def test_a_short_demo_is_clean() -> None:
    done = run_script("demo.py", "--turns", "30", "--memory", "32MiB", "--kv-heads", "1")
    figures = done.figures
    assert (done.status, figures["said"], figures["errors"], figures["findings"], figures["leaked"]) == (
        0,
        [],
        [],
        [],
        [],
    )
    assert figures["wrong_bytes"] == figures["stray_bytes"] == figures["broken_promises"] == 0
    assert figures["turns"] == 30
    assert figures["verified_loads"] > 0
    assert 0 < figures["restored_tokens"] <= figures["known_tokens"] <= figures["prompt_tokens"]
    assert figures["kills"] == 1
    assert figures["unmap_ms"] > 0
    assert figures["daemon_kills"] == 1
    assert figures["keys_found_on_disk"] >= figures["demoted_keys"] > 0
    assert 0 < figures["after_restart_from_disk_keys"] <= figures["after_restart_hit_keys"]
    assert figures["disk_most_bytes"] <= figures["disk_bytes"]
    assert figures["corrupt"] == 0


def test_another_layout_where_there_is_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States on pages of several attention layers; the model is one that has both."""
    (tmp_path / "torch.py").write_text('raise ImportError("there is none")\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_script("demo.py", "--turns", "20", "--memory", "32MiB", "--layout", "packed-pages")
    figures = done.figures
    assert (done.status, figures["said"], figures["errors"], figures["findings"]) == (0, [], [], [])
    assert (figures["layout"], figures["model"]) == ("packed-pages", "qwen3-next-80b-a3b")
    assert figures["verified_loads"] > 0
    assert figures["wrong_bytes"] == figures["broken_promises"] == figures["leaks"] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--layout", "packed-pages", "--model", "gpt-oss-20b"), "gpt-oss-20b can't be laid out as packed-pages"),
        (("--kv-heads", "9"), "1 to 8"),
    ],
)
def test_wrong_usage_is_told(arguments: tuple[str, ...], named: str) -> None:
    done = run_script("demo.py", *arguments)
    assert done.status == 2
    assert named in done.said
