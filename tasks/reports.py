"""The reports of a release: JSON for machines, PNG plots, and one HTML page that needs no network."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.steps import write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_SIZE_INCHES = (9, 3.4)
_INK, _ACCENT = "#26323a", "#1f77b4"


def write_reports(out: Path, evidence: Mapping[str, Any]) -> list[Path]:
    """Write the reports of `evidence` to the new folder `out`; returns the files.

    `evidence` has `digest`, `name`, `platform`, `quality`, `tensor_errors` (name, layer, sqnr_db), `programs`, `tpot`
    (with `requests`, or None when it was not measured) and `gates`.
    """
    out.mkdir(parents=True)
    write_json(out / "quality.json", evidence["quality"])
    write_json(out / "tensor_errors.json", evidence["tensor_errors"])
    write_json(out / "programs.json", evidence["programs"])
    write_json(out / "tpot.json", evidence["tpot"])
    plots = [_plot_layer_error(out / "layer_error.png", evidence["tensor_errors"])]
    if evidence["tpot"] and evidence["tpot"].get("requests"):
        plots.append(_plot_tpot(out / "tpot.png", evidence["tpot"]["requests"]))
    (out / "report.html").write_text(_page(evidence, plots))
    return sorted(out.iterdir())


def _plot_layer_error(path: Path, errors: Sequence[Mapping[str, Any]]) -> Path:
    groups: dict[str, list[tuple[int, float]]] = {}
    for error in errors:
        if error["layer"] is not None and error["sqnr_db"] is not None:
            groups.setdefault(error["name"].rsplit(".", 1)[-1], []).append((error["layer"], error["sqnr_db"]))

    def draw(axes: Axes) -> None:
        for projection, points in sorted(groups.items()):
            layers, sqnr_db = zip(*sorted(points), strict=True)
            axes.plot(layers, sqnr_db, marker=".", linewidth=1, label=projection)
        axes.set(xlabel="layer", ylabel="weight SQNR (dB)", title="Weight error per layer")
        if groups:
            axes.legend(ncols=4, fontsize="small")

    return _save(path, draw)


def _plot_tpot(path: Path, requests: Sequence[Mapping[str, Any]]) -> Path:
    def draw(axes: Axes) -> None:
        numbers = range(1, len(requests) + 1)
        axes.bar(list(numbers), [request["tpot_ms"] for request in requests], color=_ACCENT, width=0.6)
        axes.set(xlabel="request", ylabel="TPOT (ms)", title="Time per output token, serial requests")
        axes.set_xticks(list(numbers))

    return _save(path, draw)


def _save(path: Path, draw: Any) -> Path:
    # The object interface keeps matplotlib's global state (and any display) out of a worker process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=PLOT_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    draw(axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    path.write_bytes(buffer.getvalue())
    return path


def _page(evidence: Mapping[str, Any], plots: Sequence[Path]) -> str:
    quality = evidence["quality"]
    tpot = evidence["tpot"] or {}
    rows = {
        "Quality against the BF16 source": [
            ("perplexity, BF16", _number(quality.get("perplexity_reference"))),
            ("perplexity, W8A8", _number(quality.get("perplexity_candidate"))),
            ("ratio", _number(quality.get("perplexity_ratio"))),
            ("mean KL (nats)", _number(quality.get("mean_kl"))),
            ("top-1 agreement", _number(quality.get("top1_agreement"))),
            ("positions", _number(quality.get("positions"))),
        ],
        "Speed": [
            ("platform", str(tpot.get("platform", evidence["platform"]))),
            ("TPOT (ms, median)", _number(tpot.get("tpot_ms"))),
            ("TTFT (ms, median)", _number(tpot.get("ttft_ms"))),
        ],
        "PyPTO programs": [
            (
                program["name"],
                f"{program['status']}, {len(program['passes'])} passes, "
                f"{_number(program['simulated_us'])} us simulated",
            )
            for program in evidence["programs"]
        ],
        "Gates": [
            (
                gate["name"],
                f"{'pass' if gate['passed'] else 'FAIL'}: {_number(gate['value'])} {gate['direction']} {gate['bound']}",
            )
            for gate in evidence["gates"]
        ],
    }
    tables = "".join(
        f"<h2>{html.escape(title)}</h2><table>"
        + "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in table)
        + "</table>"
        for title, table in rows.items()
    )
    images = "".join(
        f'<img alt="{plot.stem}" src="data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}">'
        for plot in plots
    )
    greedy = quality.get("greedy") or {}
    texts = "".join(
        f"<h3>{html.escape(key)}</h3><pre>{html.escape(str(value))}</pre>" for key, value in sorted(greedy.items())
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(evidence["name"])} {evidence["digest"][:12]}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; color: {_INK}; padding: 0 1rem }}
table {{ border-collapse: collapse }} th, td {{ text-align: left; padding: .2rem 1rem .2rem 0; font-weight: normal }}
th {{ color: #5b6b75 }} img {{ max-width: 100% }} pre {{ white-space: pre-wrap; background: #f4f6f7; padding: .6rem }}
</style>
<h1>{html.escape(evidence["name"])}</h1><p>bundle <code>{evidence["digest"]}</code></p>
{tables}<h2>Plots</h2>{images}<h2>Greedy continuation</h2>{texts}</html>
"""


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "not measured" if value is None else str(value)
