"""What is tried with a driver is written down before, and struck out when it has gone well."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffloadd.device.cuda.trials import Trials, Way, _State


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvo.sock.trials"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """What the kernel's module reports about itself."""
    found = tmp_path / "version"
    found.write_text("NVRM version: 580.159.04\nGCC version: 12\n")
    return found


def said(path: Path) -> dict[str, str]:
    """Reads what was noted of each way."""
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    return {way: state for way, _, state in lines}


def test_a_way_is_written_down_before_it_is_tried_and_when_it_has_ended_well(path: Path, driver: Path) -> None:
    trials = Trials(path, driver)
    trials.begin(Way.BATCH)
    assert path.read_text() == "batch\tNVRM version: 580.159.04\ttrying\n"
    trials.begin(Way.RUNS)
    trials.begin(Way.RUNS)
    assert said(path) == {"batch": "trying", "runs": "trying"}
    trials.end(Way.BATCH)
    assert said(path) == {"batch": "works", "runs": "trying"}
    trials.end(Way.RUNS)
    assert said(path) == {"batch": "works", "runs": "works"}
    path.unlink()
    for way in Way:  # no write for each of them
        trials.begin(way)
        trials.end(way)
    assert sorted(path.parent.iterdir()) == [driver]


def test_what_has_worked_with_this_driver_is_no_trial(path: Path, driver: Path) -> None:
    """A later process that ends while it copies so has ended for another reason, unless it blames this way."""
    first = Trials(path, driver)
    first.begin(Way.BATCH)
    first.end(Way.BATCH)
    Trials(path, driver).begin(Way.BATCH)
    assert Trials(path, driver).left_out == frozenset()
    Trials(path, driver).blame([Way.BATCH])
    assert Trials(path, driver).left_out == {Way.BATCH}


def test_two_threads_that_try_at_once(path: Path, driver: Path) -> None:
    """A thread that comes to the lock late has looked before: what it notes then is older than what is known."""
    trials = Trials(path, driver)
    trials.begin(Way.BATCH)
    trials.begin(Way.BATCH)
    trials.end(Way.BATCH)
    trials._note(Way.BATCH, _State.TRYING)
    assert said(path) == {"batch": "works"}
    trials.blame([Way.BATCH])
    trials._note(Way.BATCH, _State.WORKS)
    assert said(path) == {"batch": "failed"}


def test_what_an_earlier_daemon_did_not_survive_is_left_out(
    path: Path, driver: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Trials(path, driver).left_out == frozenset()
    assert caplog.text == ""
    Trials(path, driver).begin(Way.BATCH)
    trials = Trials(path, driver)
    assert trials.left_out == {Way.BATCH}
    assert (
        f"copying without cuMemcpyBatchAsync: an earlier daemon did not survive it. To try it again, remove {path}"
        in (caplog.text)
    )
    trials.begin(Way.RUNS)
    trials.end(Way.RUNS)
    assert Trials(path, driver).left_out == {Way.BATCH}, "it stays so"
    path.unlink()
    assert Trials(path, driver).left_out == frozenset()


def test_a_new_driver_is_tried_anew(path: Path, driver: Path) -> None:
    Trials(path, driver).begin(Way.BATCH)
    driver.write_text("NVRM version: 581.1\n")
    trials = Trials(path, driver)
    assert trials.left_out == frozenset()
    trials.begin(Way.BATCH)
    trials.end(Way.BATCH)
    assert said(path) == {"batch": "works"}


def test_a_way_that_went_well_before_may_be_the_end_all_the_same(path: Path, driver: Path) -> None:
    trials = Trials(path, driver)
    trials.begin(Way.BATCH)
    trials.end(Way.BATCH)
    trials.blame([])
    assert said(path) == {"batch": "works"}
    trials.blame([Way.BATCH])
    assert Trials(path, driver).left_out == {Way.BATCH}


def test_files_of_something_else_mean_nothing(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"\xff\x00\nbatch\nsomething\t\nruns\tanother driver\n\n")
    assert Trials(path, tmp_path / "none").left_out == {Way.BATCH}  # no driver reports its version here
    path.unlink()
    path.mkdir()
    assert Trials(path, tmp_path / "none").left_out == frozenset()


def test_where_nothing_can_be_written_copies_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trials = Trials(tmp_path / "gone" / "kvo.sock.trials")
    trials.begin(Way.BATCH)
    assert "may be tried again" in caplog.text
    trials.end(Way.BATCH)
    trials.blame([Way.BATCH])


def test_a_link_is_not_followed(path: Path, driver: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    path.with_name(f"{path.name}.new").symlink_to(other)
    Trials(path, driver).begin(Way.BATCH)
    assert other.read_text() == "precious"


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    trials = Trials()
    trials.begin(Way.BATCH)
    trials.blame([Way.RUNS])
    trials.end(Way.BATCH)
    assert trials.left_out == frozenset()
    assert list(tmp_path.iterdir()) == []
