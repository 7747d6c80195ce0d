"""Parses words as argparse does, and suggests what was probably meant by those that are unknown."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvoffloadd.suggestion import closest, did_you_mean


class Parser(argparse.ArgumentParser):
    """The parser of a command. It takes no abbreviations: a later option could make them ambiguous."""

    def __init__(self, **settings: Any) -> None:
        """Makes a parser. `settings`: as for any parser."""
        super().__init__(**{"allow_abbrev": False} | settings)
        self.synonyms: Mapping[str, str] = {}
        """What is meant by the commands of other programs."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Ends the process at words that this parser does not know, whose own options are then suggested: argparse
        hands them to the parser above, which knows other options.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggest(unknown)}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError, which argparse reports, if the value is none of the action's choices."""
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            # Some programs have commands for what are options here.
            known = [*action.choices, *(option for option in self.long_options() if value == option.lstrip("-"))]
            meant = self.synonyms.get(value)
            hint = f"; did you mean {meant}?" if meant else did_you_mean(str(value), known)
            self.error(f"unknown command {value!r}{hint}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{did_you_mean(str(value), action.choices)}")

    def long_options(self) -> list[str]:
        """Returns the long options of this command."""
        return [option for action in self._actions for option in action.option_strings if option[:2] == "--"]

    def _suggest(self, unknown: Sequence[str]) -> str:
        """Returns the end of an error about these words."""
        # Without their dashes, which all options have in common.
        known = [option[2:] for option in self.long_options()]
        words = [word.lstrip("-").partition("=")[0] for word in unknown if word.startswith("-")]
        close = next(filter(None, (closest(word, known) for word in words)), "")
        return f"; did you mean --{close}?" if close else f"; `{self.prog} --help` lists all options"


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Parser]]:
    """Yields the names and parsers of a parser's commands, in the order in which they were added."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
