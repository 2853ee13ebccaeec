"""The rate and the time left behind the bar of a step that moves bytes."""

from __future__ import annotations

from rich.progress import Progress

from flows.console import StepLine, TransferRate


def test_the_rate_is_that_since_the_first_report() -> None:
    with Progress(disable=True) as bar:
        task = bar.add_task("quantize", total=None, note="")
        times = iter([10.0, 12.0, 14.0])
        rate = TransferRate(StepLine(bar, task), lambda: next(times))
        rate.advance(4 * 10**9, 10 * 10**9)
        assert bar.tasks[0].fields["note"] == ""
        rate.advance(5 * 10**9, 10 * 10**9)
        assert bar.tasks[0].fields["note"] == "0.50 GB/s, 10 s left"
        rate.advance(10 * 10**9, 10 * 10**9)
        assert (bar.tasks[0].fields["note"], bar.tasks[0].completed) == ("1.50 GB/s, 0 s left", 10 * 10**9)
