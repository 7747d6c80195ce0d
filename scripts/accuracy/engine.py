"""The model over paged memory: it remembers nothing but what it reads through block tables from its layers' tensors.

Prompts are computed token by token, all of them side by side, so that memory with equal contents gives equal answers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from kvoffloadd.layout import Attention, LayerSpec
from scripts.accuracy.model import (
    CONVOLUTION,
    FULL,
    HEAD_SIZE,
    HEADS,
    KINDS,
    RECURRENCE,
    TAPS,
    WIDTH,
    Model,
    layer_name,
    normed,
    read_state,
    widened,
)
from scripts.accuracy.task import ANSWER_TOKENS, ASK, PROMPT_TOKENS, WINDOW
from scripts.harness.layers import LayerMemory
from scripts.harness.paged import keys_and_values

torch: Any = importlib.import_module("torch")

Layer = Callable[[Any, int, Any], Any]
"""Of the normed x (sequences, WIDTH + HALF), the tokens' position, and the group's block table: what it adds to x."""

Tables = dict[int, Any]
"""Group -> i64 (sequences, blocks): the block that holds a sequence's n-th tokens."""


class PagedModel:
    """`computed`: tokens of prompts so far."""

    def __init__(self, model: Model, memory: LayerMemory) -> None:
        self.computed = 0
        self._model = model
        group_of = {layer: group.group for group in memory.groups for layer in group.layers}
        self._layers = [
            (kind, group_of[name], _layer(kind, weights, memory.specs[name], memory.layers[name]))
            for name, kind, weights in zip(map(layer_name, range(len(KINDS))), KINDS, model.layers, strict=True)
        ]

    def prefill(self, tokens: Any, tables: Tables) -> None:
        """Compute prompts. `tokens`: i64 (sequences, PROMPT_TOKENS)."""
        for position in range(PROMPT_TOKENS):
            self._step(tokens[:, position], position, tables)
        self.computed += tokens.numel()

    def answer(self, keys: Any, tables: Tables) -> Any:
        """i64 (sequences, ANSWER_TOKENS), most likely tokens. `keys`: i64 (sequences,), the key of each question; the
        prompts are in the blocks that the tables name.
        """
        self._step(torch.full_like(keys, ASK), PROMPT_TOKENS, tables)
        answers, token = [], keys
        for position in range(PROMPT_TOKENS + 1, PROMPT_TOKENS + 1 + ANSWER_TOKENS):
            token = self._step(token, position, tables).argmax(-1)
            answers.append(token)
        return torch.stack(answers, -1)

    def _step(self, tokens: Any, position: int, tables: Tables) -> Any:
        x = self._model.embed(tokens)
        for kind, group, layer in self._layers:
            x = x + widened(kind, layer(normed(x), position, tables[group]))
        return self._model.logits(x)


def _layer(kind: str, weights: Mapping[str, Any], spec: LayerSpec, layer: Any) -> Layer:
    if kind == CONVOLUTION:
        return _Convolution(spec.block_size, weights, layer)
    if kind == RECURRENCE:
        return _Recurrence(spec.block_size, weights, layer)
    if not isinstance(spec, Attention):
        raise TypeError(f"a layer of kind {kind} is described as {spec}")
    return _Attention(kind, spec, weights, layer)


class _Attention:
    def __init__(self, kind: str, spec: Attention, weights: Mapping[str, Any], layer: Any) -> None:
        self._sees_all = kind == FULL
        self._spec = spec
        self._weights = weights
        self._keys, self._values = keys_and_values(layer, spec)

    def __call__(self, y: Any, position: int, table: Any) -> Any:
        y = y[:, :WIDTH]
        query, key, value = (
            (y @ self._weights[name]).unflatten(-1, (HEADS, HEAD_SIZE)) for name in ("query", "key", "value")
        )
        here = self._places(torch.tensor([position]), table)
        self._keys[here] = key[:, None].to(self._keys.dtype)
        self._values[here] = value[:, None].to(self._values.dtype)
        first = 0 if self._sees_all else max(0, position + 1 - WINDOW)
        seen = self._places(torch.arange(first, position + 1), table)
        scores = torch.einsum("bhd,bthd->bht", query, self._keys[seen].float()) / HEAD_SIZE**0.5
        found = torch.einsum("bht,bthd->bhd", scores.softmax(-1), self._values[seen].float())
        return found.flatten(1) @ self._weights["out"]

    def _places(self, tokens: Any, table: Any) -> tuple[Any, Any]:
        """Kernel block and place in it of each of these tokens: i64 (sequences, tokens) and (tokens,)."""
        spec = self._spec
        page = spec.block_size // spec.kernel_blocks
        kernel = tokens % spec.block_size // page
        return table[:, tokens // spec.block_size] * spec.kernel_blocks + kernel, tokens % page


class _State:
    """A layer with one state. A block has it as it was after the block's last token."""

    def __init__(self, block_size: int, weights: Mapping[str, Any], layer: Any) -> None:
        self._block_size = block_size
        self._weights = weights
        (self._states,) = layer

    def _before(self, position: int, table: Any) -> Any:
        if not position:
            return torch.zeros(len(table), *self._states.shape[1:])
        return self._states[table[:, (position - 1) // self._block_size]].float()

    def _keep(self, state: Any, position: int, table: Any) -> None:
        self._states[table[:, position // self._block_size]] = state.to(self._states.dtype)


class _Convolution(_State):
    def __call__(self, y: Any, position: int, table: Any) -> Any:
        recent = torch.cat([self._before(position, table), y[:, None, :WIDTH]], 1)
        self._keep(recent[:, -TAPS:], position, table)
        return (recent * self._weights["taps"]).sum(1) @ self._weights["mix"]


class _Recurrence(_State):
    def __call__(self, y: Any, position: int, table: Any) -> Any:
        named = y[:, WIDTH:]
        gate = torch.sigmoid(named @ self._weights["gate"] + self._weights["bias"])[..., None]
        written = (named @ self._weights["write"]).unflatten(-1, (HEADS, -1))
        state = (1 - gate) * self._before(position, table) + gate * written
        self._keep(state, position, table)
        return read_state(state, y, self._weights)
