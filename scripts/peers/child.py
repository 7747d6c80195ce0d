"""One system in a separate process, in that system's Python: answers one question after the other, in lines of JSON.

Times are taken here, around the system's call alone. What the system's libraries print goes to the log.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.harness.damage import flip_in_files, flip_in_memory
from scripts.peers import pagecache
from scripts.peers.content import Content
from scripts.peers.system import I64Array, ModelGeometry, NotOfferedError, Prompt, System, SystemSetting


@dataclass(frozen=True, slots=True)
class LoadedPrompt:
    """Describes the load of a prompt. `found`: tokens that the lookup found. `told`: tokens that the system reports as
    loaded. `wrong`: blocks of these that hold wrong bytes.
    """

    lookup_s: float
    load_s: float
    found: int
    told: int
    wrong: int


class Child:
    """Its system, and the engine's blocks in an order that is new with each use."""

    def __init__(self, module: str, factory: str, arguments: dict[str, str], setting: SystemSetting) -> None:
        self._setting = setting
        made: System = getattr(importlib.import_module(module), factory)(setting, **arguments)
        self._system = made
        self._content = Content(setting.geometry)
        self._rng = np.random.default_rng(1)
        self._prompts: dict[tuple[int, int], Prompt] = {}

    def start(self) -> float:
        return _timed(self._system.start)

    def versions(self) -> dict[str, str]:
        return self._system.versions()

    def ping(self, count: int) -> list[float]:
        self._system.ping()
        return [_timed(self._system.ping) for _ in range(count)]

    def store(self, number: int, tokens: int) -> tuple[float, bool]:
        """Stores a prompt that was not stored before."""
        prompt, blocks = self._prompt(number, tokens), self._blocks(tokens)
        self._content.write(self._system.memory(), prompt, blocks)
        begun = time.perf_counter()
        stored = self._system.store(prompt, blocks)
        return time.perf_counter() - begun, stored

    def await_hit(self, number: int, tokens: int, deadline_s: float) -> int:
        """Tokens found, once all are or the deadline is over: a store's end may be reported before others see it."""
        until = time.monotonic() + deadline_s
        while (found := self._lookup(self._prompt(number, tokens))[1]) < tokens and time.monotonic() < until:
            time.sleep(0.005)
        return found

    def lookup(self, number: int, tokens: int, count: int) -> list[tuple[float, int]]:
        """Looks up without a load. Returns the tokens found."""
        prompt = self._prompt(number, tokens)
        return [self._lookup(prompt) for _ in range(count)]

    def _lookup(self, prompt: Prompt) -> tuple[float, int]:
        begun = time.perf_counter()
        found = self._system.lookup(prompt)
        seconds = time.perf_counter() - begun
        self._system.release(prompt)
        return seconds, found

    def load(self, number: int, tokens: int) -> LoadedPrompt:
        """Loads into blocks that held something else, and compares every byte."""
        prompt, blocks = self._prompt(number, tokens), self._blocks(tokens)
        self._content.scramble(self._system.memory())
        begun = time.perf_counter()
        found = self._system.lookup(prompt)
        looked = time.perf_counter()
        reported = self._system.load(prompt, blocks, found)
        ended = time.perf_counter()
        self._system.release(prompt)
        good = blocks[: reported // self._setting.geometry.block_tokens]
        wrong = self._content.wrong(self._system.memory(), prompt, good)
        return LoadedPrompt(looked - begun, ended - looked, found, reported, wrong)

    def write(self, numbers: list[int], tokens: int) -> tuple[float, bool]:
        """Store these prompts, one behind the other, until all of them is on disk. Their bytes are made before."""
        prompts = [self._prompt(number, tokens) for number in numbers]
        blocks = self._blocks(tokens * len(prompts)).reshape(len(prompts), -1)
        for prompt, own in zip(prompts, blocks, strict=True):
            self._content.write(self._system.memory(), prompt, own)
        begun = time.perf_counter()
        stored = [self._system.store(prompt, own) for prompt, own in zip(prompts, blocks, strict=True)]
        self._system.settle()
        return time.perf_counter() - begun, all(stored)

    def settle(self) -> None:
        self._system.settle()

    def forget(self) -> None:
        """What is loaded next comes from the disk, not from the system's memory nor from the kernel's."""
        self._system.forget()
        pagecache.drop(self._disk)

    def cached_share(self) -> float:
        """Returns the share of the system's files that is in the kernel's page cache."""
        return pagecache.cached_share(self._disk)

    @property
    def _disk(self) -> Path:
        if self._setting.disk is None:
            raise NotOfferedError("this session has no disk")
        return self._setting.disk

    def restart(self, *, kill: bool) -> float:
        """Restarts the system. Returns the seconds from the order to end it until it can be asked."""
        begun = time.perf_counter()
        self._system.restart(kill=kill)
        return time.perf_counter() - begun

    def damage(self, where: str, number: int, tokens: int) -> int:
        """Flip a bit of the prompt's chunk in the middle; returns in how many places it was found."""
        prompt = self._prompt(number, tokens)
        self._content.scramble(self._system.memory())
        needle = self._content.needle(prompt, prompt.chunks // 2)
        if where == "disk":
            return flip_in_files(self._disk, needle)
        try:
            return sum(flip_in_memory(pid, needle) for pid in self._system.processes())
        except PermissionError as error:
            raise NotOfferedError(f"this kernel does not allow it: {error}") from error

    def stop(self) -> None:
        self._system.stop()

    def _prompt(self, number: int, tokens: int) -> Prompt:
        """Makes a prompt with its tokens and names."""
        prompt = self._prompts.setdefault((number, tokens), Prompt(number, tokens, self._setting.geometry.chunk_tokens))
        assert prompt.token_ids and prompt.names
        return prompt

    def _blocks(self, tokens: int) -> I64Array:
        geometry = self._setting.geometry
        return self._rng.permutation(geometry.blocks)[: tokens // geometry.block_tokens]


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def answer(child: Child, question: dict[str, Any]) -> dict[str, Any]:
    """`value`, or `not_offered`: why, or `error`: what."""
    try:
        value = getattr(child, question.pop("do"))(**question)
    except NotOfferedError as error:
        return {"not_offered": str(error)}
    except Exception as error:  # noqa: BLE001 - the end of a question: whatever a peer raises is its answer
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"value": asdict(value) if isinstance(value, LoadedPrompt) else value}


def main() -> int:
    """Answers until standard input ends."""
    options = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        disk = options["disk"]
        setting = SystemSetting(
            ModelGeometry(**options["geometry"]),
            Path(options["folder"]),
            None if disk is None else Path(disk),
            **options["sizes"],
        )
        child = Child(options["module"], options["factory"], options["arguments"], setting)
        try:
            for line in sys.stdin:
                output.write(json.dumps(answer(child, json.loads(line))) + "\n")
                output.flush()
        finally:
            child.stop()
            sys.stdout.flush()
            sys.stderr.flush()
    os._exit(0)  # threads of peers' libraries can hang at the interpreter's end


if __name__ == "__main__":
    sys.exit(main())
