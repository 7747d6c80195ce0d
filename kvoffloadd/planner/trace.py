"""Reads traces of real requests: which blocks each prompt has, and how long it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvoffloadd.errors import ConfigError
from kvoffloadd.model import I64Array, U64Array

BLOCK_TOKENS, CHAT_BLOCK_TOKENS = 512, 16
"""Tokens of a block in Mooncake's traces, and in Bailian's, whose requests name their chat."""

LINE_BYTES_MAX = 16 << 20
"""A prompt of a million tokens in blocks of 16 takes 1 MiB."""

PACKED = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
}  # fmt: skip
"""First bytes of files that have to be converted first."""

_ID_END = 1 << 64
_NEED = "a trace has one JSON object a line, with `hash_ids`, the ids of a prompt's blocks"


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


@dataclass(frozen=True, slots=True, eq=False)
class TracedRequest:
    """One request of a trace. `blocks`: a u64 for each block, (n,), which stands for it and all before it. `tokens`:
    the length of the prompt; None: the trace does not say. `names_chat`: as Bailian's traces do.
    """

    where: str
    blocks: U64Array
    tokens: int | None
    names_chat: bool


@dataclass(frozen=True, slots=True, eq=False)
class RequestTrace:
    """All requests of a file, in its order, at least one of them with blocks. `block_tokens`: tokens of a block."""

    path: Path
    requests: tuple[TracedRequest, ...]
    block_tokens: int

    @property
    def references(self) -> int:
        """Returns how many blocks were asked for."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def unique_blocks(self) -> int:
        """Returns how many different blocks were asked for."""
        return len(np.unique(np.concatenate([request.blocks for request in self.requests])))

    def check_lengths(self) -> None:
        """Raises ConfigError, with the line, where the blocks can't be of `block_tokens`: whole ones, or whole ones and
        a partial one at the end. Requests without a length are not checked.
        """
        for request in self.requests:
            number, length, size = len(request.blocks), request.tokens, self.block_tokens
            if length is not None and not length // size <= number <= -(-length // size):
                raise ConfigError(
                    f"{request.where}: {number} `hash_ids` for {length} tokens are not blocks of {size} tokens; "
                    "set --trace-block-tokens"
                )

    def numbered(self) -> list[I64Array]:
        """Returns each request's blocks as numbers from 0 on, in the order in which they were first asked for."""
        every = np.concatenate([request.blocks for request in self.requests])
        _, first, inverse = np.unique(every, return_index=True, return_inverse=True)
        number = np.empty(len(first), np.int64)
        number[np.argsort(first)] = np.arange(len(first))
        ends = np.cumsum([len(request.blocks) for request in self.requests])
        return np.split(number[inverse.reshape(-1)], ends[:-1])


def read_requests(path: Path, block_tokens: int | None = None) -> RequestTrace:
    """Reads a file with one JSON object a line. `block_tokens`: tokens of a block; None: as usual for its kind.

    Raises ConfigError, with the line and what is missing, for any other file.
    """
    try:
        with path.open("rb") as file:
            requests = tuple(_request(line, where) for line, where in _lines(file, path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a trace in JSON lines") from None
    if not requests:
        raise ConfigError(f"{path}: no requests; {_NEED}")
    if not any(len(request.blocks) for request in requests):
        raise ConfigError(f"{path}: no request has a block: `hash_ids` is empty in all of {len(requests):,}")
    usual = CHAT_BLOCK_TOKENS if requests[0].names_chat else BLOCK_TOKENS
    return RequestTrace(path, requests, block_tokens or usual)


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """Reads how long the prompts of a trace are, and how many blocks they have.

    Raises ConfigError as `read_requests`, and for requests without `input_length`, their length in tokens.
    """
    trace = read_requests(path, block_tokens)
    lengths = []
    for request in trace.requests:
        if request.tokens is None:
            raise ConfigError(f"{request.where}: there is no `input_length`, the prompt's number of tokens")
        lengths.append(request.tokens)
    trace.check_lengths()
    lengths.sort()
    median, p90 = _rank(lengths, 50), _rank(lengths, 90)
    return Trace(len(lengths), median, p90, trace.block_tokens, trace.unique_blocks, trace.references)


def mixed(values: U64Array, seed: int = 0) -> U64Array:
    """Returns a well-mixed u64 for each value and this seed: the finaliser of splitmix64. Different values keep
    different.
    """
    x = values + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _chained(ids: U64Array) -> U64Array:
    """Returns a u64 for each block and all before it. Where ids already stand for that, nothing changes but the
    numbers; where they stand for a block's own tokens, the same block behind others is another one, as in engines.
    """
    places = mixed(np.arange(len(ids), dtype=np.uint64))
    return mixed(np.cumsum(mixed(ids ^ places), dtype=np.uint64))


def _rank(ordered: list[int], percent: int) -> int:
    """Returns the smallest length that at least this percentage of them does not exceed: one that does occur."""
    return ordered[-(-percent * len(ordered) // 100) - 1]


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, str]]:
    """Yields each line with text, and where it is."""
    number, limit = 0, LINE_BYTES_MAX
    while line := file.readline(limit + 1):
        number += 1
        where = f"{path}, line {number}"
        if number == 1:
            packed = next((name for begin, name in PACKED.items() if line.startswith(begin)), None)
            if packed:
                raise ConfigError(f"{path}: this is a {packed} file; unpack or convert it: {_NEED}")
        if len(line) > limit:
            raise ConfigError(f"{where}: more than {limit >> 20} MiB in one line; {_NEED}")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: not text in UTF-8; {_NEED}") from None
        if text and number == 1 and text[0] not in "{[" and "," in text:
            raise ConfigError(
                f"{path}: a table with commas, as those of Azure and BurstGPT, has lengths but no ids of blocks, and "
                f"nothing else tells which prompts begin alike; {_NEED}"
            )
        if text:
            yield text, where


def _request(line: str, where: str) -> TracedRequest:
    try:
        record: Any = json.loads(line)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply; {_NEED}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}; {_NEED}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: not an object with `hash_ids`; {_NEED}")
    if "hash_ids" not in record:
        raise ConfigError(f"{where}: there is no `hash_ids`; without the ids of blocks nothing tells which prompts "
                          "begin alike")  # fmt: skip
    ids, tokens = record["hash_ids"], record.get("input_length")
    if not isinstance(ids, list) or not all(type(number) is int and 0 <= number < _ID_END for number in ids):
        raise ConfigError(f"{where}: `hash_ids` is not a list of integers from 0 to 2**64 - 1")
    if "input_length" in record and (type(tokens) is not int or tokens < 1):
        raise ConfigError(f"{where}: `input_length` = {str(tokens)[:40]} is not a number of tokens above 0")
    return TracedRequest(where, _chained(np.array(ids, np.uint64)), tokens, "chat_id" in record)
