"""Errors of the `serving` package.

    ServingError            anything this package refuses to do
    ├── BundleError         a bundle is incomplete, damaged or of an unknown version; `problems` lists every finding
    ├── StoreError          the bundle store cannot do what was asked (unknown reference, nothing to roll back to)
    ├── TokenizerError      the tokenizer files are missing or unreadable, or a chat template refuses its messages
    ├── RequestError        a request that can never be served as it stands; `param` names the offending field
    ├── EngineError         the engine stopped: it takes no more requests and says why
    ├── SwitchError         a worker did not take up a bundle in time, or failed to load it
    ├── BenchError          a benchmark run against an endpoint could not be completed
    └── ExecutorError       an executor was handed a chunk out of range, or its computation failed

Catch `ServingError` at the edge (the command line exits with 2, the API answers with an error body); catch
`RequestError` to tell a client's mistake (HTTP 400) from the server's own failures.
"""

from __future__ import annotations

from collections.abc import Sequence


class ServingError(Exception):
    """Base of everything the `serving` package raises on bad input or failure."""


class BundleError(ServingError):
    """A bundle cannot be used; the message names every problem found, not only the first."""

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.summary = summary
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  - {problem}" for problem in self.problems)]))


class StoreError(ServingError):
    """The store has no such bundle or alias, or the move asked for is impossible."""


class TokenizerError(ServingError):
    """Tokenizer files are missing or unreadable, or the chat template refuses the messages given."""


class RequestError(ServingError):
    """A request is invalid; `param` is the request field at fault, for the API's error body."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        self.param = param
        self.code = code
        super().__init__(message)


class EngineError(ServingError):
    """The engine has stopped and takes no more requests; the message says why."""


class SwitchError(ServingError):
    """A worker failed to take up a bundle, or did not do so in time."""


class BenchError(ServingError):
    """A benchmark could not be completed: the endpoint refused, stopped short or was unreachable."""


class ExecutorError(ServingError):
    """An executor was handed a chunk out of range, or its computation failed."""
