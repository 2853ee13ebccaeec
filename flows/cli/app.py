"""The entry point: assembles the verbs and turns errors into one message and an exit code."""

from __future__ import annotations

import os
import sys

import typer

from flows.cli import bundles, deploy, doctor, inspect, programs, quality, weights
from flows.cli.output import EXIT_FAILED, EXIT_USAGE, FailedError, complain, emit_json
from flows.cli.signals import interrupted_by_signals
from flows.settings import UsageError, check_environment
from kernels.errors import KernelsError
from quantize.errors import QuantizeError, printable
from serving.errors import ServingError
from tasks.errors import ProgramsFailedError, TasksError

app = typer.Typer(
    name="pypto-deploy",
    help="Take a Hugging Face checkpoint to a W8A8 endpoint, every step measured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
for verbs in (deploy, weights, inspect, quality, programs, bundles, doctor):
    verbs.register(app)


def main() -> None:
    """Run the command line; exits 0 when done, 1 when a gate or validation failed, 2 on bad input or usage.

    A signal that stops it makes the exit status 128 + signal, after the clean-up.
    """
    with interrupted_by_signals():
        _main()


def _main() -> None:
    try:
        check_environment()
        app()
    except (FailedError, ProgramsFailedError) as error:
        _end(error, EXIT_FAILED)
    except (UsageError, QuantizeError, KernelsError, ServingError, TasksError) as error:
        _end(error, EXIT_USAGE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except OSError as error:
        # A full disk, a folder that cannot be written: the operating system's own words name the path.
        _end(error, EXIT_USAGE)


def _end(error: Exception, exit_code: int) -> None:
    complain(printable(str(error)))  # it may quote files that nobody vouches for
    if "--json" in sys.argv and not isinstance(error, FailedError):
        emit_json({"error": str(error), "kind": type(error).__name__, "exit_code": exit_code})
    sys.exit(exit_code)
