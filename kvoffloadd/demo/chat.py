"""Generates a seeded multi-turn chat: the lengths of turns, their order, and the worker that answers each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROOTS, ROOT_TOKENS = 3, 512
"""System prompts: their number, and the length of each."""
ACTIVE = 10
"""Conversations that go on at the same time."""
TURNS_EACH = 8
COMES_BACK = 0.15
"""The probability that an ended conversation is resumed, once, in place of a new one."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A prompt of `prompt_tokens`, the first `known_tokens` of them from earlier turns, and its answer."""

    number: int
    conversation: int
    worker: int
    known_tokens: int
    prompt_tokens: int
    total_tokens: int


def chat(seed: int, turns: int, workers: int) -> list[ChatTurn]:
    """Returns the turns in order; a conversation moves to another worker with every turn."""
    rng = np.random.default_rng([seed, 2])
    lengths: dict[int, int] = {}
    spoken: dict[int, int] = {}
    active: list[int] = []
    ended: list[int] = []
    roots: set[int] = set()
    begun = 0
    found = []
    for number in range(turns):
        while len(active) < ACTIVE:
            if ended and rng.random() < COMES_BACK:
                active.append(ended.pop(int(rng.integers(0, len(ended)))))
            else:
                active.append(begun)
                begun += 1
        conversation = active[int(rng.integers(0, len(active)))]
        root = conversation % ROOTS
        known = lengths.get(conversation, ROOT_TOKENS if root in roots else 0)
        roots.add(root)
        prompt = max(known, ROOT_TOKENS) + int(rng.integers(32, 160))
        total = prompt + int(rng.integers(64, 256))
        count = spoken.get(conversation, 0)
        found.append(ChatTurn(number, conversation, (conversation + count) % workers, known, prompt, total))
        lengths[conversation], spoken[conversation] = total, count + 1
        if spoken[conversation] % TURNS_EACH == 0:
            active.remove(conversation)
            if spoken[conversation] == TURNS_EACH:
                ended.append(conversation)
    return found
