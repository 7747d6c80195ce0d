"""What is remembered for requests that wait."""

from __future__ import annotations

from kvoffloadd.integrations.sglang.answers import Answers


def test_an_answer_counts_for_its_question_and_for_a_while() -> None:
    now = [0.0]
    answers = Answers(lambda: now[0])
    answers.note("r", ("k", 3), (1, 2))
    assert answers.known("r", ("k", 3)) == (1, 2)
    assert answers.known("r", ("k", 4)) is None
    assert answers.known("r", ("other", 3)) is None
    assert answers.known("other", ("k", 3)) is None
    now[0] = 2.0
    assert answers.known("r", ("k", 3)) is None
    answers.note("r", ("k", 3), ())
    assert answers.known("r", ("k", 3)) == ()
    answers.forget("r")
    assert answers.known("r", ("k", 3)) is None
    answers.forget("r")


def test_requests_that_never_come_back_take_no_more_room() -> None:
    answers = Answers()
    for number in range(5000):
        answers.note(f"{number}", ("k", 1), (1,))
    assert answers.known("0", ("k", 1)) is None
    assert answers.known("4999", ("k", 1)) == (1,)
    answers.clear()
    assert answers.known("4999", ("k", 1)) is None
