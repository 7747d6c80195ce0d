"""A system for `scripts.peers` that keeps everything in a dict, and fails on demand."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from scripts.peers.system import I64Array, NotOfferedError, Prompt, SystemSetting, U8Array


class Fake:
    """`fault`: "wrong": one byte of each load; "dies": in its first load; "refuses": a store; "raises": a load;
    "forgets": all, at a restart.
    """

    def __init__(self, setting: SystemSetting, fault: str = "") -> None:
        geometry = setting.geometry
        self._setting = setting
        self._fault = fault
        self._memory = [np.zeros((geometry.blocks, geometry.block_bytes), np.uint8) for _ in range(geometry.layers)]
        self._stored: dict[str, list[U8Array]] = {}

    def start(self) -> None:
        print("what libraries print is no answer")

    def versions(self) -> dict[str, str]:
        return {"fake": "1.0"}

    def memory(self) -> Sequence[U8Array]:
        return self._memory

    def ping(self) -> None:
        raise NotOfferedError("there is nobody")

    def store(self, prompt: Prompt, blocks: I64Array) -> bool:
        self._stored[prompt.name] = [layer[blocks] for layer in self._memory]
        return self._fault != "refuses"

    def lookup(self, prompt: Prompt) -> int:
        return prompt.tokens if prompt.name in self._stored else 0

    def load(self, prompt: Prompt, blocks: I64Array, found: int) -> int:
        if self._fault == "dies":
            os._exit(7)
        if self._fault == "raises":
            raise ValueError("it is broken\nand this is its log\nand the reason")
        if found:
            for layer, stored in zip(self._memory, self._stored[prompt.name], strict=True):
                layer[blocks] = stored
            if self._fault == "wrong":
                self._memory[-1][blocks[-1], -1] ^= 1
        return found

    def release(self, prompt: Prompt) -> None:
        pass

    def settle(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def restart(self, *, kill: bool) -> None:
        if self._fault == "forgets":
            self._stored.clear()

    def processes(self) -> Sequence[int]:
        return [os.getpid()]

    def stop(self) -> None:
        pass
