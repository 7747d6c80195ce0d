"""A seeded multi-turn chat: who says how much, in which order, and which worker answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROOTS, ROOT_TOKENS = 3, 512
"""System prompts: how many there are, and how long each is."""
ACTIVE = 10
"""Conversations that go on at the same time."""
TURNS_EACH = 8
COMES_BACK = 0.15
"""How likely an ended conversation is to be taken up again in place of a new one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt of `prompt_tokens`, all that was said before among them (`known_tokens`), and its answer."""

    number: int
    conversation: int
    worker: int
    known_tokens: int
    prompt_tokens: int
    total_tokens: int


def chat(seed: int, turns: int, workers: int) -> list[Turn]:
    """The turns in the order in which they come; a conversation goes to another worker with every turn."""
    rng = np.random.default_rng([seed, 2])
    lengths: dict[int, int] = {}
    spoken: dict[int, int] = {}
    active: list[int] = []
    ended: list[int] = []
    found = []
    for number in range(turns):
        if len(active) < ACTIVE:
            active.append(_next_conversation(rng, len(lengths), ended))
        conversation = active[int(rng.integers(0, len(active)))]
        known = lengths.setdefault(conversation, 0)
        prompt = max(known, ROOT_TOKENS) + int(rng.integers(32, 256))
        total = prompt + int(rng.integers(64, 320))
        count = spoken.get(conversation, 0)
        found.append(Turn(number, conversation, (conversation + count) % workers, known, prompt, total))
        lengths[conversation], spoken[conversation] = total, count + 1
        if spoken[conversation] % TURNS_EACH == 0:
            active.remove(conversation)
            ended.append(conversation)
    return found


def _next_conversation(rng: np.random.Generator, begun: int, ended: list[int]) -> int:
    if ended and rng.random() < COMES_BACK:
        return ended.pop(int(rng.integers(0, len(ended))))
    return begun
