"""What a trace contains about prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.errors import ConfigError
from kvoffloadd.planner import Trace, read_trace, trace
from kvoffloadd.planner.trace import read_requests
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
        ("[]", "line 2: not an object with `hash_ids`"),
        ('{"input_length": 5}', "line 2: there is no `hash_ids`"),
        ('{"hash_ids": []}', "line 2: there is no `input_length`"),
        ('{"input_length": null, "hash_ids": []}', "line 2: `input_length` = None is not a number"),
        ('{"input_length": 0, "hash_ids": []}', "line 2: `input_length` = 0 is not a number"),
        ('{"input_length": true, "hash_ids": [1]}', "line 2: `input_length` = True"),
        ('{"input_length": 1, "hash_ids": [1.5]}', "line 2: `hash_ids` is not a list of integers"),
        ('{"input_length": 1, "hash_ids": 1}', "line 2: `hash_ids` is not a list of integers"),
        ('{"input_length": 1, "hash_ids": [-1]}', "line 2: `hash_ids` is not a list of integers"),
        ('{"input_length": 1, "hash_ids": [18446744073709551616]}', "line 2: `hash_ids` is not a list of integers"),
        ("\xff\xfe", "line 2: not text in UTF-8"),
        ("[" * 200_000, "line 2: nested too deeply"),
        ("9" * 10_000, "line 2: not JSON"),
        (" " * (trace.LINE_BYTES_MAX + 1), "line 2: more than 16 MiB in one line"),
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
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (gzip.compress(b'{"hash_ids": [1]}', mtime=0), "this is a gzip file; unpack or convert it"),
        (b"\x28\xb5\x2f\xfd\x04", "this is a zstd file"),
        (b"PAR1\n", "this is a Parquet file"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,4808,10\n", "has lengths but no ids of blocks"),
        (b'{"hash_ids": []}\n' * 4, "no request has a block: `hash_ids` is empty in all of 4"),
        (b'[{"hash_ids": [1]}]', "line 1: not an object with `hash_ids`"),
        (b"\n \n", "no requests"),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as refused:
        read_requests(path)
    assert str(refused.value).startswith(str(path))


def test_requests_that_name_their_chat_have_blocks_of_16(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"chat_id": 1, "parent_chat_id": -1, "input_length": 40, "hash_ids": [7, 8, 9]}\n')
    assert (read_trace(path).block_tokens, read_trace(path).unique_tokens) == (16, 48)
    with pytest.raises(ConfigError, match="not blocks of 32 tokens"):
        read_trace(path, 32)


def test_whole_blocks_alone_are_blocks_too(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "trace.jsonl", [(600, [0]), (100, [])])).references == 1


def test_rows_need_no_length(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [3, 4]}\n{"hash_ids": [3, 5, 4]}\n')
    found = read_requests(path)
    assert (found.references, found.unique_blocks, found.block_tokens) == (5, 4, 512)
    found.check_lengths()


def test_a_block_is_another_one_behind_others(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    largest = (1 << 64) - 1
    path.write_text(
        "".join(f'{{"hash_ids": {ids}}}\n' for ids in ([largest, 1 << 62], [5, 5], [1 << 62], [largest, 0]))
    )
    assert [ids.tolist() for ids in read_requests(path).numbered()] == [[0, 1], [2, 3], [4], [0, 5]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=20).filter(any))
def test_equal_blocks_have_equal_beginnings(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in prompts))
    numbers: dict[tuple[int, ...], int] = {}
    expected = [[numbers.setdefault(tuple(ids[: at + 1]), len(numbers)) for at in range(len(ids))] for ids in prompts]
    assert [ids.tolist() for ids in read_requests(path).numbered()] == expected


@pytest.mark.skipif(not TRACE.exists(), reason="the conversation trace is not at hand")
def test_the_conversation_trace() -> None:
    found = read_trace(TRACE)
    assert (found.requests, found.unique_blocks, found.references) == (12_031, 182_790, 288_500)
    assert (found.median_tokens, found.p90_tokens) == (6909, 27_367)
