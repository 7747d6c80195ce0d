"""What is remembered for requests that wait."""

from __future__ import annotations

from kvoffloadd.integrations.sglang.lookupcache import LookupCache


def test_an_answer_counts_for_its_question_and_for_a_while() -> None:
    now = [0.0]
    answers = LookupCache(lambda: now[0])
    assert answers.ask("r", ("k", 3), lambda: (1, 2)) == (1, 2)
    assert answers.known("r", ("k", 3)) == (1, 2)
    assert answers.known("r", ("k", 4)) is None
    assert answers.known("r", ("other", 3)) is None
    assert answers.known("other", ("k", 3)) is None
    now[0] = 2.0
    assert answers.known("r", ("k", 3)) is None
    answers.ask("r", ("k", 3), tuple)
    assert answers.known("r", ("k", 3)) == ()
    answers.forget("r")
    assert answers.known("r", ("k", 3)) is None
    answers.forget("r")


def test_requests_that_never_come_back_take_no_more_room() -> None:
    answers = LookupCache()
    for number in range(5000):
        answers.ask(f"{number}", ("k", 1), lambda: (1,))
    assert answers.known("0", ("k", 1)) is None
    assert answers.known("4999", ("k", 1)) == (1,)
    answers.clear()
    assert answers.known("4999", ("k", 1)) is None


def test_however_many_wait_little_of_the_schedulers_time_goes_into_asking() -> None:
    """Each of its turns takes 10 ms, and a question 1 ms."""
    now, spent_s = [0.0], 0.0
    answers = LookupCache(lambda: now[0])

    def question() -> tuple[int, ...]:
        nonlocal spent_s
        now[0] += 0.001
        spent_s += 0.001
        return (1,)

    def turn() -> None:
        now[0] += 0.01
        for number in range(1000):
            if answers.known(f"{number}", ("k", 1)) is None:
                answers.ask(f"{number}", ("k", 1), question)

    turn()  # each is asked about once
    begun, spent_s = now[0], 0.0
    while now[0] < begun + 60.0:
        turn()
    assert 0.04 < spent_s / (now[0] - begun) < 0.1
