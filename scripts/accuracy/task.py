"""The task: questions about a long prompt. Each answer needs full attention, a window, and a state.

A prompt is pairs of tokens in three stretches. The old one pairs far keys with near keys, and near keys with values
that do not hold any more, and names modes, once or more. The middle one has more far keys, the recent one the value
of each near key. A question names a far key. Its answer is, token by token: the near key that is paired with it, the
value that this near key has now, and the mode that was named last.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

torch: Any = importlib.import_module("torch")

FAR_KEYS, NEAR_KEYS, VALUES, MODES = 12, 6, 12, 6
FILL, ASK = 0, 1
FIRST_FAR = 2
FIRST_NEAR = FIRST_FAR + FAR_KEYS
FIRST_VALUE = FIRST_NEAR + NEAR_KEYS
FIRST_MODE = FIRST_VALUE + VALUES
VOCABULARY = FIRST_MODE + MODES

OLD_PAIRS, MIDDLE_PAIRS, RECENT_PAIRS = 20, 8, 12
OLD_FAR, OLD_VALUES, OLD_MODES = 8, 8, 4
PROMPT_TOKENS = 2 * (OLD_PAIRS + MIDDLE_PAIRS + RECENT_PAIRS)
WINDOW = 40
"""Tokens: the recent stretch, a question with its answer, and some of the middle."""

QUESTION_TOKENS = 2
ANSWER_TOKENS = 3


@dataclass(frozen=True)
class TaskPrompts:
    """`tokens`: i64 (prompts, PROMPT_TOKENS). `asked`: i64 (prompts, questions), far keys. `answers`: i64 (prompts,
    questions, ANSWER_TOKENS).
    """

    tokens: Any
    asked: Any
    answers: Any

    def taught(self) -> Any:
        """i64 (prompts, questions, 4): each question and its answer but for the last token, as a model is taught."""
        ask = torch.full_like(self.asked, ASK)
        return torch.cat([torch.stack([ask, self.asked], -1), self.answers[..., :-1]], -1)


def make_prompts(count: int, generator: Any) -> TaskPrompts:
    """Random ones, each with a question about every far key."""

    def draw(most: int, *shape: int) -> Any:
        return torch.randint(0, most, (count, *shape), generator=generator)

    def shuffled(pairs: Any) -> Any:
        order = torch.rand(pairs.shape[:2], generator=generator).argsort(-1)
        return pairs.gather(1, order[..., None].expand(-1, -1, 2))

    def filled(pairs: list[Any], length: int) -> Any:
        used = sum(one.shape[1] for one in pairs)
        return shuffled(torch.cat([*pairs, torch.full((count, length - used, 2), FILL)], 1))

    near_of, value_of = FIRST_NEAR + draw(NEAR_KEYS, FAR_KEYS), FIRST_VALUE + draw(VALUES, NEAR_KEYS)
    far = shuffled(torch.stack([_all(FIRST_FAR, FAR_KEYS, count), near_of], -1))
    old = torch.stack([FIRST_NEAR + draw(NEAR_KEYS, OLD_VALUES), FIRST_VALUE + draw(VALUES, OLD_VALUES)], -1)
    # Their number differs, or else the position of the last one would give it away.
    named = torch.where(torch.arange(OLD_MODES) <= draw(OLD_MODES, 1), FIRST_MODE + draw(MODES, OLD_MODES), FILL)
    modes = torch.stack([torch.full_like(named, FILL), named], -1)
    recent = torch.stack([_all(FIRST_NEAR, NEAR_KEYS, count), value_of], -1)
    tokens = torch.cat(
        [
            filled([far[:, :OLD_FAR], old, modes], OLD_PAIRS),
            filled([far[:, OLD_FAR:]], MIDDLE_PAIRS),
            filled([recent], RECENT_PAIRS),
        ],
        1,
    ).flatten(1)
    last = torch.where(tokens >= FIRST_MODE, torch.arange(PROMPT_TOKENS), -1).max(1).values
    mode = tokens.gather(1, last[:, None]).expand(-1, FAR_KEYS)
    answers = torch.stack([near_of, value_of.gather(1, near_of - FIRST_NEAR), mode], -1)
    return TaskPrompts(tokens, _all(FIRST_FAR, FAR_KEYS, count), answers)


def _all(first: int, number: int, count: int) -> Any:
    return torch.arange(first, first + number).expand(count, -1)
