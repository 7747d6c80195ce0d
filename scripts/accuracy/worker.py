"""An engine's worker: prompts, the model over memory in one layout, and a session with the daemon."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client, GroupKind, NamespaceSpec, Outcome
from kvoffloadd.layout import Reach
from kvoffloadd.model import U8Array
from kvoffloadd.testing.process import DaemonError
from scripts.accuracy.engine import PagedModel, Tables
from scripts.accuracy.layouts import BLOCK, LAYOUTS
from scripts.accuracy.model import Model
from scripts.accuracy.task import FAR_KEYS, PROMPT_TOKENS, TaskPrompts

torch: Any = importlib.import_module("torch")

BLOCKS = PROMPT_TOKENS // BLOCK
CALL_S = 60.0
NOWHERE = 0
"""A block that must not be read: tables name it where a group needs none."""

SWAP_FALL, GROUP_FALL = 0.03, 0.5


@dataclass(frozen=True, slots=True)
class Control:
    """Wrong blocks, on purpose: in place of these `blocks` of the group each prompt is given those of its neighbour.

    `fall`: by how much that must spoil accuracy, at least.
    """

    name: str
    group: int
    blocks: range
    fall: float


class AccuracyWorker:
    """`layout`: a name of `LAYOUTS`. Prompts are restored to other blocks than those in which they were computed."""

    def __init__(self, layout: str, model: Model, prompts: TaskPrompts, seed: int) -> None:
        self.layout = layout
        self._prompts = prompts
        self._rng = np.random.default_rng(seed)
        count = len(prompts.tokens)
        groups = len(LAYOUTS[layout](1).groups)
        per_group = count * (2 * BLOCKS + FAR_KEYS)
        num_blocks = 1 + groups * per_group
        self.memory = LAYOUTS[layout](num_blocks)
        self._model = PagedModel(model, self.memory)
        ids = torch.from_numpy(1 + self._rng.permutation(num_blocks - 1)).view(groups, per_group)
        named = dict(zip((group.group for group in self.memory.groups), ids, strict=True))
        whole = count * BLOCKS
        self._source: Tables = {group: one[:whole].view(count, BLOCKS) for group, one in named.items()}
        self._target: Tables = {group: one[whole : 2 * whole].view(count, BLOCKS) for group, one in named.items()}
        self._tails: Tables = {group: one[2 * whole :].view(-1, 1) for group, one in named.items()}
        self._keys = {group: [_rolling_hash(group, prompt) for prompt in prompts.tokens.tolist()] for group in named}
        self._reaches = {}
        for group in self.memory.groups:
            spec = self.memory.specs[group.layers[0]]
            self._reaches[group.group] = Reach(spec.group_kind, BLOCK, getattr(spec, "window", 0))

    @property
    def computed(self) -> int:
        """Tokens of prompts that were computed, ever."""
        return self._model.computed

    def connect(self, socket: Path) -> None:
        """Register the memory. Raises ClientError."""
        namespace = NamespaceSpec(model="accuracy", layout=self.layout)
        self._client = Client(socket, namespace=namespace, deadline_s=CALL_S)
        self._registration = self._client.register(self.memory.cache.kv_cache())

    def disconnect(self) -> None:
        self._client.close()

    def compute(self) -> Any:
        """Compute the prompts, and answer; see `_answer`."""
        self._wipe()
        self._model.prefill(self._prompts.tokens, self._source)
        return self._answer(self._source)

    def _wipe(self) -> None:
        """All that can be a number is none, so that whatever is read without having been loaded spoils an answer."""
        for one in self.memory.flat:
            one.fill_(-1)

    def store(self) -> None:
        """All blocks of the prompts, which were computed before."""
        for at in range(len(self._prompts.tokens)):
            moved = {
                group: (keys[at], self._source[group][at].numpy().astype(np.uint32))
                for group, keys in self._keys.items()
            }
            self._move(self._client.store, moved, dict.fromkeys(moved, 0))

    def restore(self, control: Control | None = None) -> Any:
        """Load what the prompts' ends need, everything else lost, and answer. Raises DaemonError: it is not there."""
        self._wipe()
        tables = {group: torch.full_like(table, NOWHERE) for group, table in self._target.items()}
        needed = {group: reach.blocks(PROMPT_TOKENS) for group, reach in self._reaches.items()}
        first = {group: blocks.start for group, blocks in needed.items()}
        for at in range(len(self._prompts.tokens)):
            keys = {group: self._keys[group][at][start:] for group, start in first.items()}
            found = self._client.wait_ready(self._client.pin(keys, first), CALL_S)
            if PROMPT_TOKENS not in found.boundaries.tolist():
                raise DaemonError(f"{self.layout}: the daemon has not all of prompt {at}")
            if control is not None:
                keys[control.group] = self._spoilt(control, at)[first[control.group] :]
            moved = {}
            for group, start in first.items():
                ids = tables[group][at, start:] = self._target[group][at, start:]
                moved[group] = keys[group], ids.numpy().astype(np.uint32)
            self._move(self._client.load, moved, first)
            self._client.release(found.lease)
        return self._answer(tables)

    def controls(self) -> list[Control]:
        """One block of the far past of each prompt, and once all that is loaded of each group."""
        names = {GroupKind.FULL: "wrong attention", GroupKind.SLIDING: "wrong windows", GroupKind.MAMBA: "wrong states"}
        found = []
        for group, reach in self._reaches.items():
            blocks = reach.blocks(PROMPT_TOKENS)
            found.append(Control(names[reach.kind], group, blocks, GROUP_FALL))
            if reach.kind is GroupKind.FULL:
                found.append(Control("two blocks swapped", group, blocks[1:2], SWAP_FALL))
        return found

    def _spoilt(self, control: Control, at: int) -> U8Array:
        keys, blocks = self._keys[control.group][at].copy(), slice(control.blocks.start, control.blocks.stop)
        keys[blocks] = self._keys[control.group][at ^ 1][blocks]
        return keys

    def _move(self, submit: Callable[..., Any], moved: dict[int, Any], first: dict[int, int]) -> None:
        result = self._client.wait(submit(self._registration, moved, first=first), CALL_S)
        if result.outcome is not Outcome.DONE:
            raise DaemonError(f"{self.layout}: a job has ended as {result.outcome}: {result.reason}")

    def _answer(self, tables: Tables) -> Any:
        """i64 (prompts, questions, ANSWER_TOKENS): every question of every prompt, each in its own block."""
        questions = self._prompts.asked
        rows = {
            group: torch.cat([table.repeat_interleave(questions.shape[1], 0), self._tails[group]], 1)
            for group, table in tables.items()
        }
        return self._model.answer(questions.flatten(), rows).unflatten(0, questions.shape)


def _rolling_hash(group: int, prompt: list[int]) -> U8Array:
    """u8 (keys, 32): of each block, what it and all before it hold."""
    digest = hashlib.blake2b(bytes([group]), digest_size=32)
    found = []
    for block in range(BLOCKS):
        digest.update(bytes(prompt[block * BLOCK : (block + 1) * BLOCK]))
        found.append(np.frombuffer(digest.digest(), np.uint8))
    return np.stack(found)
