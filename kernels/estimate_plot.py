"""The picture of a step estimate: one line a batch over the context, its floor dashed, simulated cells as dots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.step_estimate import StepEstimate
from quantize.plots import COLOURS, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_estimate"]

SIZE_INCHES = (9.0, 4.6)


def plot_estimate(estimate: StepEstimate) -> bytes:
    """A PNG of milliseconds a step against the context, both logarithmic."""

    def draw(axes: Axes) -> None:
        for number, batch in enumerate(sorted({cell.batch for cell in estimate.cells})):
            cells = [cell for cell in estimate.cells if cell.batch == batch]
            contexts = [cell.context_tokens for cell in cells]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(contexts, [cell.step_us / 1000 for cell in cells], color=colour, label=f"batch {batch}")
            axes.plot(contexts, [cell.hbm_floor_us / 1000 for cell in cells], color=colour, linestyle="--", alpha=0.6)
            known = [cell for cell in cells if cell.origin == "simulated"]
            axes.plot(
                [cell.context_tokens for cell in known],
                [cell.step_us / 1000 for cell in known],
                color=colour,
                linestyle="",
                marker="o",
                markersize=4,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({cell.context_tokens for cell in estimate.cells})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("context, tokens a row")
        axes.set_ylabel("ms a decode step")
        axes.set_title(f"{estimate.model}: estimated step, Ascend 910B2 (dots simulated, dashed: HBM floor)")
        axes.legend(fontsize=8, ncols=2)

    return render(draw, SIZE_INCHES)
