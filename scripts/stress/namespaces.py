"""The namespaces of a stress run: random refs, and models in the layouts of `kvoffloadd.layout`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from kvoffloadd.errors import ConfigError
from scripts.harness.geometry import Geometry, random_geometry
from scripts.harness.planned import LAYOUTS, NoSuchLayoutError, model_named, planned_geometries

Thing = TypeVar("Thing")

MIXED = "mixed"
CHOICES = (*LAYOUTS, MIXED)
MODELS = ("gemma-3-4b", "qwen3-next-80b-a3b")
"""Which there are unless one is asked for: several groups of windows on few slots; states on attention's slots."""
FIRST_PLANNED = 100
NUMBERS_EACH = 10
"""Of a model's namespaces."""
RANKS_MAX = 2


def geometries(seed: int, workers: int, layout: str, model: str, plant: str = "") -> list[Geometry]:
    """Returns the geometries of all namespaces. `layout` MIXED: every layout that the models can have, and if no
    `model` is asked for random refs as well. Raises NoSuchLayoutError.
    """
    names = [model] if model else [name for name in MODELS if layout == MIXED or _is_possible(name, layout)]
    wanted = () if layout == MIXED else (layout,)
    found: list[Geometry] = []
    for at, name in enumerate(names):
        first = FIRST_PLANNED + at * NUMBERS_EACH
        ranks = 1 + int(np.random.default_rng([seed, first]).integers(0, RANKS_MAX))
        found += _planned(name, first, wanted, ranks, plant)
    if layout == MIXED and not model:
        random = [random_geometry(seed, number) for number in range(min(4, max(2, workers // 2 + 1)))]
        return [one for pair in itertools.zip_longest(reversed(found), random) for one in pair if one is not None]
    return found


def _planned(name: str, number: int, layouts: tuple[str, ...], ranks: int, plant: str) -> list[Geometry]:
    """Plans the model on fewer ranks where it does not divide."""
    model = model_named(name)
    try:
        return [*planned_geometries(name, model, number, layouts=layouts, ranks=ranks, plant=plant)]
    except ConfigError:
        return [*planned_geometries(name, model, number, layouts=layouts, plant=plant)]


def _is_possible(name: str, layout: str) -> bool:
    try:
        return bool(planned_geometries(name, model_named(name), 0, layouts=(layout,)))
    except NoSuchLayoutError:
        return False


def turns(things: tuple[Thing, ...], first: int) -> Iterator[Thing]:
    """One after the other, for ever, so that all of them come up."""
    return itertools.islice(itertools.cycle(things), first % len(things), None)
