"""Weights that change: nothing is found from the first sign on, and other names are taken once SGLang has forgotten."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.sglang.files import FilesAtStart, Source
from kvoffloadd.integrations.sglang.weights import WeightChanges
from kvoffloadd.protocol.messages import TOKEN_BYTES


class Follower:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.generation = 0
        self.tokens: list[bytes] = []

    def suspend(self) -> None:
        self.told.append("suspend")

    def renew(self, generation: int) -> None:
        self.told.append("renew")
        self.generation = generation

    def clear(self, token: bytes) -> None:
        self.told.append("clear")
        self.tokens.append(token)


@pytest.fixture
def follower() -> Follower:
    return Follower()


@pytest.fixture
def weights(follower: Follower) -> WeightChanges:
    weights = WeightChanges()
    weights.number_engine(lambda: 7)
    weights.follow(follower, Fingerprint.AUTO)
    return weights


def test_a_flush_by_itself_changes_nothing(weights: WeightChanges, follower: Follower) -> None:
    weights.flush()
    assert follower.told == []


def test_a_change_and_a_flush(weights: WeightChanges, follower: Follower) -> None:
    weights.flush()
    weights.change()
    assert follower.told == ["suspend"]
    weights.flush()
    weights.flush()
    assert follower.told == ["suspend", "renew", "clear"]
    first = follower.generation
    weights.change()
    weights.flush()
    assert follower.generation not in (0, first)


def test_a_session_ends_before_names_are_new(weights: WeightChanges, follower: Follower) -> None:
    weights.session_begins()
    weights.change()
    weights.flush()
    assert "renew" not in follower.told
    weights.session_ends()
    assert follower.told[-2:] == ["renew", "clear"]
    weights.session_ends()
    assert follower.told.count("renew") == 1


def test_a_session_without_a_flush_needs_one(weights: WeightChanges, follower: Follower) -> None:
    weights.session_begins()
    weights.flush()
    weights.change()  # what was computed after that flush is not of these weights
    weights.session_ends()
    assert "renew" not in follower.told
    weights.flush()
    assert follower.told[-1] == "clear"


def test_ranks_have_one_name_and_engines_others(follower: Follower) -> None:
    names = []
    for engine in (7, 7, 8):
        weights, one = WeightChanges(), Follower()
        weights.number_engine(partial(int, engine))
        weights.follow(one, Fingerprint.AUTO)
        weights.change()
        weights.flush()
        names.append(one.generation)
    assert names[0] == names[1] != names[2]


def test_the_number_of_the_engine_is_found_once(weights: WeightChanges) -> None:
    def another() -> int:
        raise AssertionError("the other ranks do not come here again")

    assert weights.number_engine(another) == 7


def test_who_comes_later_takes_the_names_of_now(weights: WeightChanges, follower: Follower) -> None:
    weights.change()
    weights.flush()
    late = Follower()
    weights.follow(late, Fingerprint.AUTO)
    assert late.generation == follower.generation
    assert late.told == ["renew"], "it clears nothing"
    weights.change()
    later = Follower()
    weights.follow(later, Fingerprint.AUTO)
    assert later.told == ["renew", "suspend"]


# --- weights that come from files ---


class Replica:
    """An engine, or one of its data-parallel replicas, with a unique number. `how`: None: it has no storage yet."""

    numbers = itertools.count(1)

    def __init__(self, how: Fingerprint | None = Fingerprint.AUTO) -> None:
        self.weights, self.follower = WeightChanges(), Follower()
        self.weights.number_engine(lambda: next(self.numbers))
        if how is not None:
            self.weights.follow(self.follower, how)

    def load(self, model: Path, load_format: str | None = None, meanwhile: Callable[[], bool] = lambda: True) -> None:
        """And forget the pages of before."""
        done = self.weights.load(Source(str(model), hub=True), load_format, lambda: (meanwhile(), "loaded"))
        assert done[1] == "loaded"
        self.weights.flush()

    def name(self) -> int:
        """What its pages are named by."""
        return self.follower.generation


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / name, name) for name in ("first", "second")]


def write(model: Path, content: str) -> Path:
    model.mkdir(exist_ok=True)
    (model / "m.safetensors").write_text(content)
    return model


def test_who_has_loaded_the_same_weights_has_one_name(models: list[Path]) -> None:
    replicas = [Replica(), Replica()]
    seen = set()
    for model in (*models, models[0]):
        for replica in replicas:
            replica.load(model)
        assert replicas[0].name() == replicas[1].name()
        seen.add(replicas[0].name())
    assert len(seen) == 3, "what was loaded before may be left in part"
    assert replicas[0].follower.told == ["suspend", "renew"] * 3, "nothing that others have is cleared"


def test_all_ranks_of_an_engine_ask_for_one_clear() -> None:
    """Each change's is another one, and no other engine's."""
    ranks = [WeightChanges(), WeightChanges(), WeightChanges()]
    followers = [Follower(), Follower(), Follower()]
    for number, rank, follower in zip((7, 7, 8), ranks, followers, strict=True):
        rank.number_engine(lambda number=number: number)  # type: ignore[misc]
        rank.follow(follower, Fingerprint.AUTO)
        for _ in range(2):
            rank.change()
            rank.flush()
    one, other, stranger = (follower.tokens for follower in followers)
    assert one == other
    assert len({*one, *stranger}) == 4
    assert all(len(token) == TOKEN_BYTES for token in one)


def test_a_flush_that_one_of_them_refuses_parts_them_for_a_while(models: list[Path]) -> None:
    one, other = Replica(), Replica()
    one.load(models[0])
    other.weights.load(Source(str(models[0]), hub=True), None, lambda: (True, ""))
    assert other.follower.told == ["suspend"]
    for replica in (one, other):
        replica.load(models[1])
    assert one.name() == other.name()


@pytest.mark.parametrize("doubt", ["other files", "failed", "another format", "written meanwhile", "nameless"])
def test_weights_that_may_be_others_have_other_names(doubt: str, models: list[Path], tmp_path: Path) -> None:
    one, other = Replica(), Replica()
    one.load(models[0])
    if doubt == "other files":
        other.load(models[1])
    elif doubt == "failed":
        other.load(models[0], meanwhile=lambda: False)
    elif doubt == "another format":
        other.load(models[0], "pt")
    elif doubt == "written meanwhile":
        other.load(models[0], meanwhile=lambda: bool(write(models[0], "other")))
    else:
        other.load(tmp_path / "org" / "model")
    assert other.name()
    assert one.name() != other.name()


def test_nobody_knows_weights_that_have_ever_been_changed_otherwise(models: list[Path]) -> None:
    """What is loaded from files may leave some of them."""
    one, other = Replica(), Replica()
    for replica in (one, other):
        replica.weights.change()
        replica.load(models[0])
    assert one.name() != other.name()
    names = {one.name()}
    for replica in (one, other):
        replica.weights.session_begins()
        replica.load(models[1])
        replica.weights.session_ends()
    assert one.name() != other.name()
    assert one.name() not in names


def test_without_a_storage_no_files_are_named(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(how=None)
    monkeypatch.setattr(FilesAtStart, "look", None)
    replica.load(models[0])
    late = Follower()
    replica.weights.follow(late, Fingerprint.AUTO)
    other = Replica()
    monkeypatch.undo()
    other.load(models[0])
    assert late.generation != other.follower.generation
