"""The plots of a report, as PNG bytes, from the JSON of `quality_findings`.

Drawn for a light and a dark page alike: a white panel with dark ink. Colours are Okabe & Ito's, which people with
colour vision deficiencies can tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_SIZE_INCHES = (9.0, 3.6)
DOTS_PER_INCH = 110
INK = "#26323a"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5d5d5d", "#8a6d00")
INPUT_COLOURS = {"qkv": COLOURS[0], "o": COLOURS[2], "gate_up": COLOURS[4], "down": COLOURS[1]}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Json = Mapping[str, Any]


def render(draw: Callable[[Axes], None], size_inches: tuple[float, float] = PLOT_SIZE_INCHES) -> bytes:
    """A PNG of what `draw` puts on its axes."""
    # The object interface keeps matplotlib's global state (and any display) out of a worker process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    draw(axes)
    axes.title.set(color=INK, fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


def quality_plots(findings: Json) -> dict[str, bytes]:
    """Every plot that the findings have data for, by file stem, in the order of a report."""
    candidates = findings["candidates"]
    plots = {"perplexity": plot_perplexity(findings), "kl": plot_kl(candidates)}
    if any(candidate["layers"] for candidate in candidates):
        plots["layer_output_own"] = plot_layer_output(candidates, "own_sqnr_db", "Error of each layer alone")
        plots["layer_output_carried"] = plot_layer_output(
            candidates, "carried_sqnr_db", "Error carried through the layers"
        )
    for number, candidate in enumerate(candidates):
        if _has_weight_errors(candidate["weights"]):
            stem = "layer_error" if len(candidates) == 1 else f"layer_error_{number + 1}"
            plots[stem] = plot_weight_errors(candidate["weights"], candidate["name"])
    if findings["activations"]:
        plots["activations"] = plot_activations(findings["activations"])
    return plots


def plot_perplexity(findings: Json) -> bytes:
    """Perplexity of the source and of every candidate over it, in percent, with 95 % intervals."""
    candidates = findings["candidates"]

    def draw(axes: Axes) -> None:
        for row, candidate in enumerate(candidates):
            ratio = candidate["figures"]["perplexity_ratio"]
            low, value, high = (100 * (ratio[key] - 1) if ratio[key] else 0.0 for key in ("low", "value", "high"))
            colour = COLOURS[row % len(COLOURS)]
            axes.errorbar(value, row, xerr=[[value - low], [high - value]], fmt="o", color=colour, capsize=4)
            axes.annotate(
                f"{value:+.2f} %  (perplexity {candidate['figures']['perplexity_candidate']['value'] or 0:.3f})",
                (value, row),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=INK,
            )
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(candidates)), [candidate["name"] for candidate in candidates])
        axes.set_ylim(len(candidates) - 0.4, -0.7)
        axes.set(
            xlabel="perplexity above the source, %",
            title=f"Perplexity against the source's {findings['perplexity']['value'] or 0:.3f} (95 % intervals)",
        )

    return render(draw, (9.0, 1.5 + 0.55 * len(candidates)))


def plot_kl(candidates: Sequence[Json]) -> bytes:
    """The share of positions whose divergence from the source is as large or larger, on logarithmic axes."""

    def draw(axes: Axes) -> None:
        for row, candidate in enumerate(candidates):
            points = [(kl, share) for kl, share in candidate["kl_curve"] if kl and kl > 1e-7]
            if points:
                axes.plot(*zip(*points, strict=True), color=COLOURS[row % len(COLOURS)], label=candidate["name"])
                mean = candidate["figures"]["mean_kl"]["value"]
                axes.axvline(mean, color=COLOURS[row % len(COLOURS)], linestyle=":", linewidth=1)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="KL divergence from the source, nats (dotted: mean)",
            ylabel="share of positions",
            title="How many positions diverge that much or more",
        )
        axes.set_xlim(left=1e-4)
        if axes.lines:
            axes.legend(fontsize="small", frameon=False)

    return render(draw)


def plot_layer_output(candidates: Sequence[Json], key: str, title: str) -> bytes:
    """The signal to noise ratio of every decoder layer's output; `key` names the kind of `LayerError`."""

    def draw(axes: Axes) -> None:
        for row, candidate in enumerate(candidates):
            points = [(error["layer"], error[key]) for error in candidate["layers"] if error[key] is not None]
            if points:
                colour = COLOURS[row % len(COLOURS)]
                axes.plot(*zip(*points, strict=True), marker=".", color=colour, label=candidate["name"])
        axes.set(xlabel="layer", ylabel="SQNR, dB (higher is better)", title=title)
        if axes.lines:
            axes.legend(fontsize="small", frameon=False)

    return render(draw)


def plot_weight_errors(errors: Sequence[Json], name: str) -> bytes:
    """The signal to quantization noise ratio of every weight, by projection, over the layers."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for error in errors:
        if error["layer"] is not None and error["sqnr_db"] is not None:
            groups.setdefault(error["name"].rsplit(".", 1)[-1], []).append((error["layer"], error["sqnr_db"]))

    def draw(axes: Axes) -> None:
        ordered = sorted(groups, key=lambda group: (PROJECTIONS.index(group) if group in PROJECTIONS else 99, group))
        for row, projection in enumerate(ordered):
            points = zip(*sorted(groups[projection]), strict=True)
            axes.plot(*points, marker=".", linewidth=1, label=projection, color=COLOURS[row % len(COLOURS)])
        axes.set(xlabel="layer", ylabel="weight SQNR, dB", title=f"Error of each weight: {name}")
        if groups:
            axes.legend(ncols=4, fontsize="small", frameon=False)

    return render(draw)


def plot_activations(statistics: Sequence[Json]) -> bytes:
    """The ratio of a token's largest activation to its RMS, mean and largest, per input over the layers."""
    groups: dict[str, list[tuple[int, float, float]]] = {}
    for entry in statistics:
        groups.setdefault(entry["input"], []).append(
            (entry["layer"], entry["amax_to_rms_mean"], entry["amax_to_rms_max"])
        )

    def draw(axes: Axes) -> None:
        for name, rows in groups.items():
            layers, means, largest = zip(*rows, strict=True)
            colour = INPUT_COLOURS.get(name, INK)
            axes.plot(layers, means, color=colour, label=f"{name}: mean over tokens")
            axes.fill_between(layers, means, largest, color=colour, alpha=0.10, linewidth=0)
        axes.set(
            xlabel="layer",
            ylabel="largest / RMS of a token",
            title="Outliers of activations (shaded: up to the worst token)",
        )
        axes.set_ylim(bottom=0)
        axes.legend(ncols=2, fontsize="small", frameon=False)

    return render(draw)


def plot_tpot(requests: Sequence[Json]) -> bytes:
    """Time per output token of each serial request, in milliseconds."""

    def draw(axes: Axes) -> None:
        numbers = list(range(1, len(requests) + 1))
        axes.bar(numbers, [request["tpot_ms"] for request in requests], color=COLOURS[0], width=0.6)
        axes.set(xlabel="request", ylabel="TPOT (ms)", title="Time per output token, serial requests")
        axes.set_xticks(numbers)

    return render(draw, (9.0, 2.8))


def _has_weight_errors(errors: Sequence[Json]) -> bool:
    return any(error["layer"] is not None and error["sqnr_db"] is not None for error in errors)
