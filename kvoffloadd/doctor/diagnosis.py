"""The result of a check: its subject, its finding, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """The daemon works, with less than it could have."""
    PROBLEM = "problem"
    """The daemon does not start, or something that the config asks for does not work."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One result. `found` is one line; `remedy` describes what to do, and is empty if nothing has to be done."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def ok(subject: str, found: str) -> Diagnosis:
    """Makes a result without a problem."""
    return Diagnosis(subject, Verdict.OK, found)


def note(subject: str, found: str, remedy: str) -> Diagnosis:
    """Makes a result for a daemon that works, with less than it could have."""
    return Diagnosis(subject, Verdict.NOTE, found, remedy)


def problem(subject: str, found: str, remedy: str) -> Diagnosis:
    """Makes a result for something that does not work."""
    return Diagnosis(subject, Verdict.PROBLEM, found, remedy)
