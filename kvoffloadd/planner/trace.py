"""Reads from a trace of real requests how long prompts are, and how many distinct blocks they have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffloadd.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The prompts of a trace. `median_tokens`, `p90_tokens`: lengths of prompts that occur in it. `block_tokens`:
    tokens of the trace's own blocks.
    """

    requests: int
    median_tokens: int
    p90_tokens: int
    block_tokens: int
    unique_blocks: int
    references: int

    @property
    def unique_tokens(self) -> int:
        """Returns what a cache that held everything would hold; partial blocks count as full ones."""
        return self.unique_blocks * self.block_tokens


def read_trace(path: Path, block_tokens: int = TRACE_BLOCK_TOKENS) -> Trace:
    """Reads a trace of one JSON object a line: `input_length` in tokens, `hash_ids` of its blocks of `block_tokens`.

    Raises ConfigError, with the line, for any other file.
    """
    lengths: list[int] = []
    unique: set[int] = set()
    references = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    length, ids = _request(line, f"{path}, line {number}", block_tokens)
                    lengths.append(length)
                    unique.update(ids)
                    references += len(ids)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a trace in JSON lines") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not text; name a trace in JSON lines") from None
    if not lengths:
        raise ConfigError(f"{path}: no requests")
    lengths.sort()
    return Trace(len(lengths), _rank(lengths, 50), _rank(lengths, 90), block_tokens, len(unique), references)


def _rank(ordered: list[int], percent: int) -> int:
    """Returns the smallest length that at least this percentage of them does not exceed: one that does occur."""
    return ordered[-(-percent * len(ordered) // 100) - 1]


def _request(line: str, where: str, block_tokens: int) -> tuple[int, list[int]]:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: not an object with `input_length` and `hash_ids`")
    length, ids = record.get("input_length"), record.get("hash_ids")
    if type(length) is not int or length < 1:
        raise ConfigError(f"{where}: `input_length` = {length!r} is not a number of tokens above 0")
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise ConfigError(f"{where}: `hash_ids` is not a list of integers")
    if len(ids) != -(-length // block_tokens):
        raise ConfigError(
            f"{where}: {len(ids)} `hash_ids` for {length} tokens are not blocks of {block_tokens} tokens; "
            "set --trace-block-tokens"
        )
    return length, ids
