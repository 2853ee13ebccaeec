"""What a person sees while a release runs: one line a step, a bar on long work. Everything goes to stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tasks import progress as task_progress


class StepLine:
    """The line of the running step; implements the tasks' `ProgressListener`."""

    def __init__(self, bar: Progress, task_id: TaskID) -> None:
        self._bar = bar
        self._task_id = task_id
        self.outcome = ""

    def advance(self, done: int, total: int) -> None:
        """Move the bar."""
        self._bar.update(self._task_id, completed=done, total=total)

    def note(self, text: str) -> None:
        """Show a remark behind the bar."""
        self._bar.update(self._task_id, note=text)


class TransferRate:
    """Advances a line by bytes, with the rate and the time left behind the bar."""

    def __init__(self, line: StepLine, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = line
        self._clock = clock
        self._start: tuple[float, int] | None = None

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        """Move the bar; from the second call on the rate is that since the first one."""
        now_s = self._clock()
        if self._start is None:
            self._start = (now_s, done_bytes)
        started_s, first_bytes = self._start
        self._line.advance(done_bytes, total_bytes)
        if now_s > started_s and done_bytes > first_bytes:
            bytes_per_s = (done_bytes - first_bytes) / (now_s - started_s)
            left_s = (total_bytes - done_bytes) / bytes_per_s
            self._line.note(f"{bytes_per_s / 1e9:.2f} GB/s, {left_s:.0f} s left")


class ReleaseConsole:
    """Prints steps as they run and finish."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, name: str) -> Iterator[StepLine]:
        """Show `name` as running inside the block; leaves one line with its outcome and seconds."""
        started = time.monotonic()
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        mark = "[red]x[/]"
        # A bar is for a person at a terminal; a log gets the finished line alone.
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            line = StepLine(bar, bar.add_task(f"{name:<22}", total=None, note=""))
            try:
                with task_progress.listening(line):
                    yield line
                mark = "[green]+[/]"
            finally:
                seconds = time.monotonic() - started
                bar.stop()
                self._console.print(f"{mark} {name:<22} {seconds:7.1f} s  {line.outcome or 'failed'}")

    def say(self, text: str) -> None:
        """Print one line that belongs to no step."""
        self._console.print(text)


_console = ReleaseConsole(quiet=True)


def current() -> ReleaseConsole:
    """The console of this process; silent unless the command line has set one."""
    return _console


def use(console: ReleaseConsole) -> None:
    """Make `console` the console of this process."""
    global _console
    _console = console
