"""What a trace contains about prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffloadd.errors import ConfigError
from kvoffloadd.planner import Trace, read_trace
from tests.planner.models import TRACE


def write(path: Path, requests: list[tuple[int, list[int]]]) -> Path:
    lines = (json.dumps({"timestamp": 0, "input_length": length, "hash_ids": ids}) for length, ids in requests)
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


def test_by_hand(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [(600, [0, 1]), (100, [2]), (1025, [0, 1, 3]), (512, [0]), (1, [0])])
    assert read_trace(path) == Trace(5, 512, 1025, 512, 4, 8)
    assert read_trace(path).unique_tokens == 2048


def test_blocks_of_another_size(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [(40, [0, 1, 2])])
    assert read_trace(path, 16).unique_tokens == 48
    with pytest.raises(ConfigError, match=r"line 1: 3 `hash_ids` for 40 tokens are not blocks of 512 tokens; set --tr"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not an object with `input_length`"),
        ('{"hash_ids": []}', "line 2: `input_length` = None is not a number"),
        ('{"input_length": 0, "hash_ids": []}', "line 2: `input_length` = 0 is not a number"),
        ('{"input_length": true, "hash_ids": [1]}', "line 2: `input_length` = True"),
        ('{"input_length": 1, "hash_ids": [1.5]}', "line 2: `hash_ids` is not a list of integers"),
        ('{"input_length": 1, "hash_ids": 1}', "line 2: `hash_ids` is not a list of integers"),
        ("\xff\xfe", "not text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"input_length": 5, "hash_ids": [1]}\n' + line.encode("latin-1"))
    with pytest.raises(ConfigError, match=complaint):
        read_trace(path)


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(tmp_path / "empty.jsonl")


@pytest.mark.skipif(not TRACE.exists(), reason="the conversation trace is not at hand")
def test_the_conversation_trace() -> None:
    found = read_trace(TRACE)
    assert (found.requests, found.unique_blocks, found.references) == (12_031, 182_790, 288_500)
    assert (found.median_tokens, found.p90_tokens) == (6909, 27_367)
