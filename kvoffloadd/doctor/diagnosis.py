"""What a check says: what it looked at, what it found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """The daemon works, with less than it could have."""
    PROBLEM = "problem"
    """The daemon does not start, or something that the config asks for does not work."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One answer. `found` is one line; `remedy` says what to do, and is empty where nothing has to be done."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def ok(subject: str, found: str) -> Diagnosis:
    """All is well."""
    return Diagnosis(subject, Verdict.OK, found)


def note(subject: str, found: str, remedy: str) -> Diagnosis:
    """It works, with less than it could have."""
    return Diagnosis(subject, Verdict.NOTE, found, remedy)


def problem(subject: str, found: str, remedy: str) -> Diagnosis:
    """It does not work."""
    return Diagnosis(subject, Verdict.PROBLEM, found, remedy)
