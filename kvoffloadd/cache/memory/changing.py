"""Marks changes of the cache's tables, so that the type of an unexpected error shows that it broke one of them off.

`with changing:` encloses a change that must happen as a whole: tables are consistent before it and after it, but not
during it. `@changing` does the same for a function. An error that passes through becomes a `CacheTornError`, except an
error that was raised on purpose: such an error changes nothing. Marks may be nested. Entering and leaving one takes a
fraction of a microsecond. Functions that only marked changes call, such as `Cache.commit`, have no mark.

A change may last over several turns of the event loop. A task that serves the cache as long as the daemon runs is one
change: if it ended, its current work would stay half done. Only the tasks that take disk roots in and watch them mark
single changes, since most of their errors are errors of the disk. Reads are not marked: an error in one costs the
request or job that it serves. Calls of a device are not marked either: a job fails alone if its device does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

from kvoffloadd.errors import KvOffloadError

P = ParamSpec("P")
T = TypeVar("T")


class CacheTornError(Exception):
    """An error broke off a change of the cache's tables, which may be half-written. Its cause is that error.

    It is not a `KvOffloadError`: code that handles errors that were raised on purpose must not handle this one.
    """


_ON_PURPOSE = (KvOffloadError, OSError, CacheTornError)


class Changing:
    """Marks a change: a context manager, and a decorator of plain functions. It has no state."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            _raise_torn(error)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def change(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                _raise_torn(error)
                raise

        return change


changing: Final = Changing()


def _raise_torn(error: BaseException) -> None:
    """Raises CacheTornError unless the error was raised on purpose, or is the end of a task or of a generator."""
    if isinstance(error, Exception) and not isinstance(error, _ON_PURPOSE):
        raise CacheTornError(f"{type(error).__name__}: {error}") from error


def torn_by(error: BaseException | None) -> CacheTornError | None:
    """Returns the `CacheTornError` that led to this error, or is this error; None: no table is torn."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, CacheTornError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
