"""Suggests what was probably meant by a word that is unknown: a command, an option, a config key or a value."""

from __future__ import annotations

from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str:
    """Returns the one of the `known` words that is probably meant; empty: none is close."""
    import difflib  # only for errors: the command line starts sooner without it

    words = list(known)
    # A beginning of a single word is as good as that word, however short: difflib wants more of it.
    begun = [name for name in words if word and name.startswith(word)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(word, words, n=1)
    return close[0] if close else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown word: the one that is probably meant, or all that are known."""
    words = list(known)
    close = closest(word, words)
    return f"; did you mean {close}?" if close else f"; known are {', '.join(words)}"
