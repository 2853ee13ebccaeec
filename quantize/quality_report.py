"""The quality report: sections of the page, plots and files, made from the JSON of `quality_findings` alone."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantize.confidence import BLOCK_POSITIONS, RESAMPLES
from quantize.html_report import Cell, Html, Plot, Quote, Section, Table, Text, page
from quantize.plots import quality_plots

Json = Mapping[str, Any]
FIGURES = (
    ("perplexity_candidate", "perplexity", 5),
    ("perplexity_ratio", "ratio to the source", 5),
    ("mean_kl", "mean KL, nats", 3),
    ("p50_kl", "median KL", 3),
    ("p99_kl", "99th percentile KL", 3),
    ("top1_agreement", "top-1 agreement", 4),
)
PLOT_TEXTS = {
    "perplexity": "Perplexity of every candidate above the source's, with 95 % intervals",
    "kl": "Share of positions by their KL divergence from the source",
    "layer_output_own": "Signal to noise of each decoder layer given the source's input",
    "layer_output_carried": "Signal to noise of the residual stream after each decoder layer",
    "activations": "Largest activation over RMS, per input and layer",
}


def write_quality_report(out: Path, findings: Json) -> list[Path]:
    """Write `quality.json`, the plots and `quality.html` into the folder `out` (made if absent); returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    plots = quality_plots(findings)
    title = f"Quality of {', '.join(candidate['name'] for candidate in findings['candidates'])}"
    files = {
        "quality.json": (json.dumps(findings, indent=2, sort_keys=True, allow_nan=False) + "\n").encode(),
        "quality.html": page(title, f"against {findings['source']}", quality_sections(findings, plots)).encode(),
        **{f"{stem}.png": png for stem, png in plots.items()},
    }
    for name, content in files.items():
        (out / name).write_bytes(content)
    return [out / name for name in sorted(files)]


def quality_sections(findings: Json, plots: Mapping[str, bytes]) -> list[Section]:
    """The sections of a page on `findings`, with the plots of `quality_plots`; those without data are left out."""
    candidates = findings["candidates"]
    return [
        Section("Summary", [_summary(findings), *_summary_texts(findings), *_plots(plots, "perplexity", "kl")]),
        Section("Layers", _layer_blocks(candidates, plots)),
        Section("Weights", _weight_blocks(candidates, plots)),
        Section("Activations of the source", _activation_blocks(findings["activations"], plots)),
        Section("Greedy continuation", _greedy_blocks(findings)),
        Section("Where the candidates differ most", [_worst_table(candidate) for candidate in candidates]),
    ]


def interval_cell(interval: Json | None, digits: int = 4) -> Html:
    """A figure with the limits of its interval behind it."""
    if interval is None or interval["value"] is None:
        return Html("not measured")
    value, low, high = (
        "inf" if interval[key] is None else f"{interval[key]:.{digits}g}" for key in ("value", "low", "high")
    )
    return Html(f'{value} <span class="range">{low} to {high}</span>')


def _summary(findings: Json) -> Table:
    candidates = findings["candidates"]
    dash = Html("&ndash;")
    rows: list[list[Cell]] = [
        ["run by", findings["ran_as"], *(candidate["ran_as"] for candidate in candidates)],
        ["size", _megabytes(findings["bytes"]), *(_megabytes(candidate["bytes"]) for candidate in candidates)],
    ]
    for key, title, digits in FIGURES:
        source = interval_cell(findings["perplexity"], digits) if key == "perplexity_candidate" else dash
        rows.append(
            [title, source, *(interval_cell(candidate["figures"].get(key), digits) for candidate in candidates)]
        )
    return Table(["", findings["source"], *(candidate["name"] for candidate in candidates)], rows)


def _summary_texts(findings: Json) -> list[Text]:
    return [
        Text(
            f"{findings['positions']:,} positions of {findings['text']} ({findings['tokens']:,} tokens in windows of "
            f"{findings['window_tokens']} that know nothing of each other). Behind each figure is its 95 % interval: "
            f"circular block bootstrap, blocks of {BLOCK_POSITIONS} neighbouring positions, {RESAMPLES:,} resamples, "
            "all models on the same draws. The interval of a ratio is the one to judge by: that of a perplexity is "
            "wide because passages differ, which both models share.",
            quiet=True,
        )
    ]


def _plots(plots: Mapping[str, bytes], *stems: str) -> list[Plot]:
    return [Plot(plots[stem], PLOT_TEXTS.get(stem, stem)) for stem in stems if stem in plots]


def _layer_blocks(candidates: Sequence[Json], plots: Mapping[str, bytes]) -> list[Text | Plot | Table]:
    notes: list[Text | Plot | Table] = [
        Text(f"{candidate['name']}: {candidate['layers_note']}", quiet=True)
        for candidate in candidates
        if candidate["layers_note"]
    ]
    measured = [candidate for candidate in candidates if candidate["layers"]]
    if not measured:
        return notes
    text = Text(
        "Alone: the layer gets the source's input, and noise is relative to what the layer adds. Carried: each model's "
        "own input, noise relative to the whole residual stream. 20 dB is a tenth of the signal, 40 dB a hundredth.",
        quiet=True,
    )
    columns = ["layer"] + [f"{candidate['name']}: {kind}" for candidate in measured for kind in ("alone", "carried")]
    rows: list[list[Cell]] = [
        [str(errors[0]["layer"])]
        + [_decibels(error[key]) for error in errors for key in ("own_sqnr_db", "carried_sqnr_db")]
        for errors in zip(*(candidate["layers"] for candidate in measured), strict=True)
    ]
    return [
        text,
        *notes,
        *_plots(plots, "layer_output_own", "layer_output_carried"),
        Table(columns, rows, folded="Every layer, dB"),
    ]


def _weight_blocks(candidates: Sequence[Json], plots: Mapping[str, bytes]) -> list[Text | Plot | Table]:
    blocks: list[Text | Plot | Table] = list(_plots(plots, *(stem for stem in plots if stem.startswith("layer_error"))))
    for candidate in candidates:
        weights = candidate["weights"]
        measured = sorted((e for e in weights if e["sqnr_db"] is not None), key=lambda error: error["sqnr_db"])
        folded = sum(bool(error.get("folded")) for error in weights)
        if folded:
            blocks.append(
                Text(
                    f"{candidate['name']}: {folded} of {len(weights)} quantized weights had scales or rotations folded "
                    "in and have no error of their own to show; the layers' output errors above count.",
                    quiet=True,
                )
            )
        if measured:
            rows: list[list[Cell]] = [[error["name"], _decibels(error["sqnr_db"])] for error in measured]
            blocks.append(
                Table(["weight", "SQNR, dB"], rows, folded=f"{candidate['name']}: all weights, the worst first")
            )
    return blocks


def _activation_blocks(statistics: Sequence[Json], plots: Mapping[str, bytes]) -> list[Text | Plot | Table]:
    if not statistics:
        return []
    worst = sorted(statistics, key=lambda entry: entry["sqnr_db"] if entry["sqnr_db"] is not None else 1e9)
    columns = [
        "layer", "input of", "INT8 SQNR, dB", "largest", "RMS", "largest / RMS", "worst token", "kurtosis",
        "largest channels (times the median channel)",
    ]  # fmt: skip

    def row(entry: Json) -> list[Cell]:
        modules = ", ".join(name.rsplit(".", 1)[-1] for name in entry["modules"])
        channels = ", ".join(
            f"{channel} ({'inf' if times is None else f'{times:.3g}'})" for channel, times in entry["top_channels"]
        )
        figures = [entry[key] for key in ("amax", "rms", "amax_to_rms_mean", "amax_to_rms_max", "kurtosis")]
        return [str(entry["layer"]), modules, _decibels(entry["sqnr_db"]), *figures, channels]

    return [
        Text(
            "A token is quantized with one scale, its largest value over 127: the larger that is beside the RMS, the "
            "fewer levels the rest gets. Kurtosis is 3 for a normal distribution. The ten inputs that INT8 hurts most:",
            quiet=True,
        ),
        *_plots(plots, "activations"),
        Table(columns, [row(entry) for entry in worst[:10]]),
        Table(columns, [row(entry) for entry in statistics], folded="All inputs, layer by layer"),
    ]


def _greedy_blocks(findings: Json) -> list[Text | Quote]:
    prompt = findings["greedy_prompt"]
    blocks: list[Text | Quote] = [
        Text(Html(f"Prompt: <code>{html.escape(prompt)}</code>. Marked: what follows the first different token.")),
        Quote(findings["source"], findings["greedy"]),
    ]
    for candidate in findings["candidates"]:
        greedy = candidate["greedy"]
        if greedy is None:
            continue
        split = greedy["diverges_at"]
        outcome = "the same throughout" if split is None else f"differs from token {split + 1} on"
        own = f"<mark>{html.escape(greedy['own'])}</mark>" if split is not None else html.escape(greedy["own"])
        blocks.append(Quote(f"{candidate['name']}: {outcome}", Html(html.escape(greedy["same"]) + own)))
    return blocks


def _worst_table(candidate: Json) -> Table:
    rows: list[list[Cell]] = [
        [
            Html(f"&hellip;{html.escape(worst['context'])}<mark>{html.escape(worst['expected'])}</mark>"),
            _guesses(worst["reference"]),
            _guesses(worst["candidate"]),
            worst["kl"],
        ]
        for worst in candidate["worst"]
    ]
    return Table(["text, and its next token", "the source expected", f"{candidate['name']} expected", "KL, nats"], rows)


def _guesses(guesses: Sequence[Json]) -> Html:
    def line(guess: Json) -> str:
        token = html.escape(json.dumps(guess["token"], ensure_ascii=False))
        return f'<span class="whole"><code>{token}</code> {guess["probability"]:.0%}</span>'

    return Html("<br>".join(line(guess) for guess in guesses))


def _decibels(value: float | None) -> Html:
    return Html("exact" if value is None else f"{value:.1f}")


def _megabytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 1e6:,.1f} MB"
