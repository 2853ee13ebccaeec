"""What each recipe leaves of plain rounding's damage, on one model and the evaluation text.

    python benchmarks/quality_sample.py SOURCE [--presets NAME,NAME] [--tokens N] [--window N] [--dtype D]
        [--work DIR] [--json FILE]

Quantizes SOURCE with every preset, evaluates all of them against SOURCE on the same positions (transformers, W8A8
through compressed-tensors), and prints a Markdown table. Behind figures stand their 95 % intervals: circular block
bootstrap over positions, all models on the same draws, so the shares of plain rounding's increase and KL are paired.
With --work, the checkpoints are kept there and reused. A preset that this version cannot make is skipped by name; then
the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.confidence import Interval, confidence
from quantize.errors import QuantizeError
from quantize.quality import DEFAULT_WINDOW_TOKENS, PositionFigures, compare, summarize
from quantize.quality_run import checkpoint_bytes, kept_logits, load_tokenizer, text_tokens
from quantize.recipe import Recipe
from quantize.texts import evaluation_text
from quantize.transformers_model import TransformersModel

BASELINE = "rtn"
PRESETS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "rtn+clip": {"clip": "mse"},
    "rtn, down_proj bf16": {"down": "bf16"},
    "smoothquant": {"algorithm": "smoothquant"},
    "smoothquant+rotate": {"algorithm": "smoothquant", "smoothing": {"rotate": True}},
    "gptq": {"algorithm": "gptq"},
    "smoothquant+gptq": {"algorithm": "smoothquant+gptq"},
    "smoothquant+gptq+rotate": {"algorithm": "smoothquant+gptq", "smoothing": {"rotate": True}},
    "auto": {"algorithm": "auto"},
}
COLUMNS = (
    "recipe", "perplexity", "above the source, %", "share of rtn's increase", "mean KL", "share of rtn's KL",
    "top-1", "MB", "seconds",
)  # fmt: skip


def make_checkpoint(source: Path, out: Path, options: dict[str, Any]) -> float:
    """Quantize `source` to `out` with the recipe of `options`; returns wall seconds."""
    recipe = Recipe.model_validate(options)
    started = time.monotonic()
    if importlib.util.find_spec("quantize.pipeline") is not None:
        pipeline = importlib.import_module("quantize.pipeline")
        pipeline.quantize(source, out, recipe)
    elif recipe.algorithm == "rtn":
        from quantize.rtn import quantize_checkpoint

        quantize_checkpoint(source, out, recipe)
    else:
        raise QuantizeError(f"this version has no algorithm {recipe.algorithm}")
    return time.monotonic() - started


def statistics(figures: Mapping[str, PositionFigures], index: Tensor) -> dict[str, float]:
    """Every figure of the table over the positions in `index`, as `recipe/figure`."""
    reports = {name: summarize(found, index) for name, found in figures.items()}
    base = reports[BASELINE]
    values = {f"{BASELINE}/perplexity_reference": base.perplexity_reference}
    for name, report in reports.items():
        values[f"{name}/perplexity"] = report.perplexity_candidate
        values[f"{name}/increase_percent"] = 100 * (report.perplexity_ratio - 1)
        values[f"{name}/increase_share"] = share(
            report.perplexity_candidate - report.perplexity_reference,
            base.perplexity_candidate - base.perplexity_reference,
        )
        values[f"{name}/mean_kl"] = report.mean_kl
        values[f"{name}/kl_share"] = share(report.mean_kl, base.mean_kl)
        values[f"{name}/top1"] = report.top1_agreement
    return values


def share(part: float, whole: float) -> float:
    """`part / whole`, infinite where the whole is nothing."""
    return part / whole if whole else math.inf


def table(intervals: Mapping[str, Interval], facts: Mapping[str, Mapping[str, float]], source_bytes: int) -> str:
    """The Markdown table: the source, then every recipe."""

    def cell(key: str, digits: int, scale: float = 1.0) -> str:
        found = intervals[key]
        value, low, high = (f"{scale * limit:.{digits}f}" for limit in (found.value, found.low, found.high))
        return f"{value} ({low} to {high})"

    rows = [["source", cell(f"{BASELINE}/perplexity_reference", 3), *["-"] * 5, f"{source_bytes / 1e6:.1f}", "-"]]
    for name, fact in facts.items():
        rows.append(
            [
                name,
                cell(f"{name}/perplexity", 3),
                cell(f"{name}/increase_percent", 2),
                "1" if name == BASELINE else cell(f"{name}/increase_share", 2),
                cell(f"{name}/mean_kl", 4),
                "1" if name == BASELINE else cell(f"{name}/kl_share", 2),
                cell(f"{name}/top1", 4),
                f"{fact['bytes'] / 1e6:.1f}",
                f"{fact['seconds']:.1f}" if fact["seconds"] else "-",
            ]
        )
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Quantize, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--presets", default=",".join(name for name in PRESETS if "," not in name))
    parser.add_argument("--tokens", type=int, help="evaluate on the first N tokens (default: all of the text)")
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW_TOKENS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--work", type=Path, help="keep the checkpoints here, and reuse what is there")
    parser.add_argument("--json", type=Path, help="write all figures here too")
    options = parser.parse_args()
    names = [BASELINE, *(name for name in options.presets.split(",") if name != BASELINE)]
    unknown = [name for name in names if name not in PRESETS]
    if unknown:
        parser.error(f"found presets {', '.join(unknown)}; expected some of {', '.join(PRESETS)}")
    dtype = getattr(torch, options.dtype)
    tokens = text_tokens(load_tokenizer(options.source), evaluation_text(), options.tokens)
    reference = TransformersModel(options.source, dtype)
    figures: dict[str, PositionFigures] = {}
    facts: dict[str, dict[str, float]] = {}
    skipped: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="quality-sample-") as scratch,
        kept_logits(reference.logits, len(tokens), reference.embedding.shape[0], len(names)) as logits,
    ):
        folder = options.work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            out = folder / name.replace(", ", "-").replace(" ", "-")
            try:
                seconds = 0.0 if out.exists() else make_checkpoint(options.source, out, PRESETS[name])
            except QuantizeError as error:
                print(f"{name}: skipped, {error}", file=sys.stderr)
                skipped.append(name)
                continue
            facts[name] = {"bytes": checkpoint_bytes(out), "seconds": seconds}
            candidate = TransformersModel(out, dtype)
            figures[name] = compare(tokens, logits, candidate.logits, options.window)
            del candidate
            print(f"{name}: {summarize(figures[name])}", file=sys.stderr, flush=True)
    positions = len(figures[BASELINE].kl)
    intervals = confidence(lambda index: statistics(figures, index), positions)
    print(f"{positions:,} positions, windows of {options.window}, {options.dtype} arithmetic\n")
    print(table(intervals, facts, checkpoint_bytes(options.source)))
    if options.json:
        content = {"positions": positions, "facts": facts, "intervals": {k: asdict(v) for k, v in intervals.items()}}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if skipped else 0


if __name__ == "__main__":
    raise SystemExit(main())
