"""A tiny hybrid model: layers with states, with a window and with full attention, trained here to do the task.

What a token finds is decided by content alone: a convolution gives each token the one before it, and attention looks
for that. So it begins with weights that can find what stood behind a token; training teaches the rest, such as
which of several values holds. Which mode a token names is in a part of its vector that the recurrence alone reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvoffloadd.errors import KvOffloadError
from scripts.accuracy.task import (
    ANSWER_TOKENS,
    FAR_KEYS,
    FIRST_MODE,
    PROMPT_TOKENS,
    VOCABULARY,
    WINDOW,
    TaskPrompts,
    make_prompts,
)

torch: Any = importlib.import_module("torch")

CONVOLUTION, NEAR, FULL, RECURRENCE = "convolution", "window", "full", "recurrence"
KINDS = (CONVOLUTION, NEAR, FULL, NEAR, FULL, RECURRENCE)
HALF = 32
WIDTH = 2 * HALF
"""Of what attention and the convolution read and write: what a token is, and behind it what stood before it."""

HEADS, HEAD_SIZE, STATE_SIZE = 2, 32, 16
TAPS = 2
"""Tokens before the present one that a convolution remembers."""

BATCH, STEPS = 16, 240
RATE, LAST_RATE = 1e-2, 5e-4
LOSS_MAX, LAST_STEPS = 0.05, 10
"""What the loss must be, on average of the last steps."""

ATTEMPTS, SEED_STEP = 3, 1 << 20
NEVER = -1e30


def layer_name(at: int) -> str:
    """Returns the name of the layer at this index."""
    return f"{KINDS[at]}.{at}"


class UntrainedError(KvOffloadError):
    """The model did not learn the task within its steps."""


@dataclass(frozen=True)
class Model:
    """`embedding`: f32 (VOCABULARY, HALF), also used to make logits. `layers`: weights by name, see `_weights`."""

    embedding: Any
    layers: tuple[dict[str, Any], ...]

    def parameters(self) -> list[Any]:
        return [self.embedding, *(weight for layer in self.layers for weight in layer.values())]

    def embed(self, tokens: Any) -> Any:
        """f32 (..., WIDTH + HALF): of modes the last part, of other tokens the first."""
        found, names_mode = self.embedding[tokens], (tokens >= FIRST_MODE)[..., None]
        return torch.cat([found * ~names_mode, torch.zeros_like(found), found * names_mode], -1)

    def logits(self, x: Any) -> Any:
        """f32 (..., VOCABULARY)."""
        y = normed(x)
        others, modes = self.embedding[:FIRST_MODE].T, self.embedding[FIRST_MODE:].T
        return torch.cat([y[..., :HALF] @ others, y[..., WIDTH:] @ modes], -1) / HALF**0.5


def normed(x: Any) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def widened(kind: str, change: Any) -> Any:
    """What a layer of this kind adds to x, in the part that it writes."""
    return torch.nn.functional.pad(change, (WIDTH, 0) if kind == RECURRENCE else (0, HALF))


def read_state(state: Any, y: Any, layer: Mapping[str, Any]) -> Any:
    """What the recurrence has to say, where a token asks for it. `state`: f32 (..., HEADS, STATE_SIZE)."""
    return state.flatten(-2) @ layer["read"] * torch.sigmoid(y[..., :WIDTH] @ layer["open"])


def new_model(generator: Any) -> Model:
    """Untrained."""
    directions = torch.nn.functional.normalize(torch.randn((VOCABULARY, HALF), generator=generator), dim=-1)
    layers = tuple(_weights(kind, KINDS.index(kind) == at, generator) for at, kind in enumerate(KINDS))
    model = Model(directions * HALF**0.5, layers)
    for parameter in model.parameters():
        parameter.requires_grad_()
    return model


def _weights(kind: str, finds: bool, generator: Any) -> dict[str, Any]:
    """Returns the weights of a layer. `finds`: it begins with what finding takes; others begin with next to nothing."""

    def small(*shape: int, scale: float = 0.02) -> Any:
        return scale * torch.randn(shape, generator=generator)

    if kind == CONVOLUTION:
        layer = {"taps": small(TAPS + 1, WIDTH, scale=0.05), "mix": small(WIDTH, WIDTH)}
        layer["taps"][TAPS - 1] += 1
        layer["mix"][:HALF, HALF:] += torch.eye(HALF)
        return layer
    if kind == RECURRENCE:
        return {
            "gate": small(HALF, HEADS, scale=0.1),
            "bias": torch.full((HEADS,), -3.0),
            "write": small(HALF, HEADS * STATE_SIZE, scale=0.1),
            "read": small(HEADS * STATE_SIZE, HALF, scale=0.1),
            "open": small(WIDTH, HALF, scale=0.1),
        }
    layer = {name: small(WIDTH, HEADS * HEAD_SIZE) for name in ("query", "key", "value")}
    layer["out"] = small(HEADS * HEAD_SIZE, WIDTH)
    for head in range(HEADS if finds else 0):
        part = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
        turn = torch.linalg.qr(torch.randn((HALF, HEAD_SIZE), generator=generator))[0]
        layer["query"][:HALF, part] += 1.2 * turn
        layer["key"][HALF:, part] += 1.2 * turn
        layer["value"][:HALF, part] += torch.eye(HALF)
        layer["out"][part, :HALF] += 0.7 * torch.eye(HALF)
    return layer


# --- training: all tokens at once ---


class _Positions:
    """A prompt, and behind it its questions side by side: each sees the prompt and itself."""

    def __init__(self, questions: int) -> None:
        length = 1 + ANSWER_TOKENS
        at = torch.arange(PROMPT_TOKENS + length * questions)
        inside = at >= PROMPT_TOKENS
        self.branch = torch.where(inside, (at - PROMPT_TOKENS) // length, -1)
        position = torch.where(inside, PROMPT_TOKENS + (at - PROMPT_TOKENS) % length, at)
        branch = self.branch
        self.seen = (at[None] <= at[:, None]) & ((branch[None] < 0) | (branch[None] == branch[:, None]))
        self.near = self.seen & (position[:, None] - position[None] < WINDOW)
        self.begin = (PROMPT_TOKENS + length * branch - 1).clamp(min=0)
        before = torch.where(inside & (position == PROMPT_TOKENS), PROMPT_TOKENS - 1, at - 1)
        none = len(at)
        self.before = [torch.where(before < 0, none, before)]
        while len(self.before) < TAPS:
            earlier = torch.cat([self.before[0], torch.tensor([none])])
            self.before.append(earlier[self.before[-1]])


def train(seed: int) -> Model:
    """Raises UntrainedError: it has not learned the task, several times."""
    for attempt in range(ATTEMPTS):
        model, loss = _trained(seed + attempt * SEED_STEP)
        if loss <= LOSS_MAX:
            return model
    raise UntrainedError(f"seed {seed}: a loss of {loss:.3f} after {STEPS} steps, {ATTEMPTS} times; try another seed")


def _trained(seed: int) -> tuple[Model, float]:
    """Trains in ever smaller steps. Returns the model, and its loss at the end."""
    generator = torch.Generator().manual_seed(seed)
    model, positions = new_model(generator), _Positions(FAR_KEYS)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE + (LAST_RATE - RATE) * step / STEPS
        loss = _loss(model, positions, make_prompts(BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, sum(losses[-LAST_STEPS:]) / LAST_STEPS


def _loss(model: Model, positions: _Positions, prompts: TaskPrompts) -> Any:
    x = model.embed(torch.cat([prompts.tokens, prompts.taught().flatten(1)], 1))
    for kind, layer in zip(KINDS, model.layers, strict=True):
        y = normed(x)
        x = x + widened(kind, MIXES[kind](y, layer, positions))
    logits = model.logits(x[:, PROMPT_TOKENS:]).unflatten(1, (FAR_KEYS, -1))[:, :, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 2), prompts.answers.flatten())


def _attention(y: Any, layer: dict[str, Any], seen: Any) -> Any:
    y = y[..., :WIDTH]
    query, key, value = ((y @ layer[name]).unflatten(-1, (HEADS, -1)) for name in ("query", "key", "value"))
    scores = torch.einsum("bthd,bshd->bhts", query, key) / HEAD_SIZE**0.5
    weights = scores.masked_fill(~seen, NEVER).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, value).flatten(2) @ layer["out"]


def _convolution(y: Any, layer: dict[str, Any], positions: _Positions) -> Any:
    y = y[..., :WIDTH]
    padded = torch.nn.functional.pad(y, (0, 0, 0, 1))
    recent = y * layer["taps"][TAPS]
    for distance, before in enumerate(positions.before, 1):
        recent = recent + padded[:, before] * layer["taps"][TAPS - distance]
    return recent @ layer["mix"]


def _recurrence(y: Any, layer: dict[str, Any], positions: _Positions) -> Any:
    """Unrolled: what each token wrote, as far as later gates have left it."""
    named = y[..., WIDTH:]
    gate = named @ layer["gate"] + layer["bias"]
    kept = torch.nn.functional.logsigmoid(-gate).cumsum(1)
    questions = kept - kept[:, positions.begin] + kept[:, PROMPT_TOKENS - 1 : PROMPT_TOKENS]
    kept = torch.where((positions.branch >= 0)[:, None], questions, kept).transpose(1, 2)
    left = (kept[:, :, :, None] - kept[:, :, None]).masked_fill(~positions.seen, NEVER).exp()
    weights = left * torch.sigmoid(gate).transpose(1, 2)[:, :, None]
    written = (named @ layer["write"]).unflatten(-1, (HEADS, -1))
    return read_state(torch.einsum("bhts,bshd->bthd", weights, written), y, layer)


MIXES: dict[str, Callable[[Any, dict[str, Any], _Positions], Any]] = {
    CONVOLUTION: _convolution,
    NEAR: lambda y, layer, positions: _attention(y, layer, positions.near),
    FULL: lambda y, layer, positions: _attention(y, layer, positions.seen),
    RECURRENCE: _recurrence,
}
