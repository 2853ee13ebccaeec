"""The picture of a simulated run: a row a core, a bar a task, a colour a stage; below it how busy the cores were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.timeline import CORES, Timeline
from quantize.plots import COLOURS, INK, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_timeline"]

SIZE_INCHES = (11.0, 5.6)
BAR_ROWS = 0.9
GAP_ROWS = 1.5
"""Empty rows between the cube cores and the vector cores."""


def plot_timeline(timeline: Timeline, title: str) -> bytes:
    """A PNG of every task that the timeline holds, over the microseconds of the run."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    rows = {"cube": 0.0, "vector": CORES["cube"] + GAP_ROWS}
    colours = {stage.name: COLOURS[number % len(COLOURS)] for number, stage in enumerate(timeline.stages)}

    def draw(axes: Axes) -> None:
        for name, colour in colours.items():
            bars = []
            for task in timeline.tasks:
                if task.stage == name:
                    low = rows[task.kind] + task.core
                    high = low + BAR_ROWS
                    bars.append([(task.start_us, low), (task.end_us, low), (task.end_us, high), (task.start_us, high)])
            axes.add_collection(PolyCollection(bars, facecolors=colour, edgecolors="white", linewidths=0.2))
        axes.set_xlim(0, timeline.us)
        axes.set_ylim(rows["vector"] + CORES["vector"], -1)
        axes.set_yticks(
            [rows[kind] + CORES[kind] / 2 for kind in CORES],
            [f"{CORES[kind]} {kind}\ncores,\n{timeline.busy[kind]:.0%} busy" for kind in CORES],
        )
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("simulated us (Ascend 910B2, cost model)")
        thinned = len(timeline.tasks) < timeline.total_tasks
        drawn = f", the longest {len(timeline.tasks)} of {timeline.total_tasks} tasks" if thinned else ""
        axes.set_title(f"{title}: {timeline.us:.1f} us{drawn}")
        stages = [
            Patch(color=colours[stage.name], label=f"{stage.name.lower()} {stage.us:.1f}") for stage in timeline.stages
        ]
        axes.legend(
            handles=stages,
            title="us added by",
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            fontsize=8,
            title_fontsize=8,
            frameon=False,
            labelcolor=INK,
        )

    return render(draw, SIZE_INCHES)
