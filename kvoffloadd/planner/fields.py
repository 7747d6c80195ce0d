"""Reads the keys of a config.json. Each is checked, and an error names the key and what would work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvoffloadd.errors import ConfigError, NoPlanError

NESTED = ("text_config", "llm_config", "language_config")
"""The keys under which models that see or hear describe their text layers."""

INSTEAD = (
    "so that its groups can't be worked out; ask the engine for them and plan with kvoffloadd.layout (docs/LAYOUTS.md)"
)
"""The advice for a model that is not understood."""

COUNT_MAX, VALUE_MAX = 10_000, 1 << 32
"""The most heads or layers (keys `num_...`), and the largest whole number of any other key. A plan names each layer and
each head, so that it would take all memory for numbers that no model has.
"""

CLASS_DEFAULTS: dict[str, dict[str, object]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {"global_head_dim": 512},
    "llama4_text": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192},
    "mllama_text_model": {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
}
"""Values by `model_type` that published files leave out, because the model's class in transformers has them."""


class Fields:
    """The keys of one model. Those of the nested text model take precedence over those around it. A null counts as
    absent.

    `wrapper`: the `model_type` around the text model; None: there is none. `assumed`: values that the file does not
    have; for people.
    """

    def __init__(self, source: str, values: Mapping[str, object]) -> None:
        nested = next((name for name in NESTED if isinstance(values.get(name), dict)), "")
        inner = values[nested] if nested else {}
        self.source = source
        self.wrapper = values.get("model_type") if nested else None
        self.assumed: list[str] = []
        self._prefix = f"{nested}." if nested else ""
        self._inner = inner if isinstance(inner, dict) else {}
        self._values = {**_set_values(values), **_set_values(self._inner)}
        self.model_type = self.text("model_type", "")
        self._defaults = CLASS_DEFAULTS.get(self.model_type, {})

    def error(self, key: str, problem: str) -> ConfigError:
        """Makes an error for the caller to raise; it names the key, its file and the problem."""
        return ConfigError(f"{self.source}: {self._prefix if key in self._inner else ''}{key} {problem}")

    def unknown(self, key: str, problem: str) -> NoPlanError:
        """Makes an error for the caller to raise: this key changes the cache in a way that the planner does not
        know.
        """
        return NoPlanError(f"{self.error(key, problem)}, {INSTEAD}")

    def get(self, key: str) -> object | None:
        """Returns the value, or else the default of the model's class. None: there is neither."""
        if key in self._values:
            return self._values[key]
        default = self._defaults.get(key)
        if default is not None:
            assumption = f"{key} = {default} is not in the file: it is what transformers has for {self.model_type}"
            if assumption not in self.assumed:
                self.assumed.append(assumption)
        return default

    def inside(self, key: str) -> Fields:
        """Returns the keys of a map. Raises ConfigError if the value is no map."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.error(key, f"= {value!r} must be a map")
        return Fields(f"{self.source}: {key}", value)

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a whole number above 0. Raises ConfigError, also if it is absent and there is no default, or more
        than a model can have.
        """
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing; it must be a whole number above 0")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"= {value!r} must be a whole number above 0")
        most = COUNT_MAX if key.startswith("num_") else VALUE_MAX
        if value > most:
            raise self.error(key, f"= {value} must be at most {most}")
        return value

    def text(self, key: str, default: str) -> str:
        """Returns text, or the default if it is absent. Raises ConfigError for any other type."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"= {value!r} must be text")
        return value

    def items(self, key: str) -> list[object] | None:
        """Returns a list; None: absent or empty. Raises ConfigError for any other type."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(key, f"= {value!r} must be a list")
        return value or None


def _set_values(values: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in values.items() if value is not None}


def read_fields(path: Path) -> Fields:
    """Reads the file. Raises ConfigError if it can't be read or is no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a model's config.json") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object, as a model's config.json is")
    return Fields(str(path), values)
