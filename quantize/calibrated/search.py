"""`auto`: the cheapest recipe that leaves little enough of plain rounding's damage.

Candidates are tried in order of what they cost to make and change; each is a whole checkpoint beside the target,
judged against the source on calibration text that none of them was calibrated on. The first that meets the bounds is
put in place. When none does, the Linears with the most noise per byte stay BF16, as far as the budget goes; after that
the best one found is taken, and the table says that the bounds were missed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.architecture import linear_modules
from quantize.calibrated.simulate import compare_simulated, final_hidden
from quantize.calibration import calibration_windows, check_windows
from quantize.checkpoint import CheckpointReader, payload_digest
from quantize.errors import CheckpointError, RecipeError
from quantize.identity import source_state, work_identity
from quantize.preflight import check_source
from quantize.quality import QualityReport, summarize
from quantize.recipe import ModuleScheme, Recipe, recipe_ignored_modules
from quantize.rtn import QuantizeResult, TensorError
from quantize.staging_folder import check_target
from quantize.streaming import Progress

HELD_OUT_TOKENS = 4096
SEARCH_NAME = "search.json"
Quantizer = Callable[[Path, Path, Recipe], QuantizeResult]
logger = logging.getLogger(__name__)


def candidates(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """The recipes to try, cheapest first; everything but algorithm, clipping and rotation is as `recipe` has it."""

    def variant(algorithm: str, *, rotate: bool = False, clip: str = "none") -> Recipe:
        smoothing = recipe.smoothing.model_copy(update={"rotate": rotate})
        return recipe.model_copy(update={"algorithm": algorithm, "clip": clip, "smoothing": smoothing})

    return [
        ("rtn", variant("rtn")),
        ("rtn, clipped", variant("rtn", clip="mse")),
        ("smoothquant", variant("smoothquant")),
        ("smoothquant+gptq", variant("smoothquant+gptq")),
        ("smoothquant+gptq, rotated", variant("smoothquant+gptq", rotate=True)),
    ]


@contextmanager
def _search_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` for the candidates, one search at a time; kept when the search is interrupted."""
    check_target(out)
    folder = out.parent / f".{out.name}.search"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error.strerror} ({error.filename})") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{out}: another process searches for it (in {folder}); wait for it, or choose another place"
            ) from None
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def quantize_auto(
    source: Path, out: Path, recipe: Recipe, quantize: Quantizer, progress: Progress | None = None
) -> QuantizeResult:
    """Search, and put the checkpoint chosen in place as `out`; `search` of the result has a row for each candidate.

    `quantize(source, out, recipe)` makes one candidate. The checkpoint holds the recipe that makes it again, and the
    table as `search.json`. `progress(done, total)` counts candidates. Raises what `quantize` raises; an interrupted
    search goes on after the candidates that were finished.
    """
    started = time.monotonic()
    held_out_tokens = recipe.calibration.held_out_tokens or HELD_OUT_TOKENS
    calibration = recipe.calibration.model_copy(update={"held_out_tokens": held_out_tokens})
    recipe = recipe.model_copy(update={"calibration": calibration})
    tried = candidates(recipe)
    with check_source(source) as reader, torch.no_grad(), _search_folder(out) as folder:
        _, held_out = calibration_windows(source, recipe.calibration)
        check_windows(held_out, source, reader.config)
        judge = _Judge(reader, held_out, recipe, folder, quantize)
        for done, (name, variant) in enumerate(tried, 1):
            met = judge.consider(name, variant)
            if progress is not None:
                progress(done, len(tried))
            if met:
                break
        else:
            judge.spend_bf16(tried[-1][1])
        if progress is not None:
            progress(len(tried), len(tried))
        row, result, chosen = judge.best()
        if not row["met"]:
            logger.warning(
                "no recipe left at most %.0f %% of plain rounding's KL and %.0f %% of its perplexity increase; %s is "
                "the best found, with %.0f %% and %.0f %%",
                100 * recipe.search.max_kl_share,
                100 * recipe.search.max_perplexity_share,
                row["recipe"],
                100 * row["kl_share"],
                100 * row["perplexity_share"],
            )
        row["chosen"] = True
        (chosen / SEARCH_NAME).write_text(json.dumps({"rows": judge.rows}, indent=1) + "\n")
        digest = payload_digest(chosen)
        check_target(out)
        chosen.rename(out)
        return replace(result, digest=digest, seconds=time.monotonic() - started, search=judge.rows)


class _Judge:
    """Makes candidates and judges them; keeps rows, results and folders."""

    def __init__(
        self, reader: CheckpointReader, held_out: Tensor, recipe: Recipe, folder: Path, quantize: Quantizer
    ) -> None:
        self._reader = reader
        self._held_out = held_out
        self._recipe = recipe
        self._folder = folder
        self._quantize = quantize
        self._state = source_state(reader)
        self._hidden = final_hidden(reader, held_out)
        self._baseline: QualityReport | None = None
        self.rows: list[dict[str, Any]] = []
        self._made: list[tuple[QuantizeResult, Path]] = []

    def consider(self, name: str, recipe: Recipe) -> bool:
        """Make and judge one candidate; whether it meets the bounds."""
        started = time.monotonic()
        result, folder = self._make(recipe)
        made_seconds = time.monotonic() - started
        with CheckpointReader(folder) as candidate:
            report = summarize(compare_simulated(self._reader, self._hidden, candidate, self._held_out))
        if self._baseline is None:
            self._baseline = report
        base = self._baseline
        kl_share = report.mean_kl / base.mean_kl if base.mean_kl else 0.0
        increase = base.perplexity_candidate - base.perplexity_reference
        perplexity_share = (
            (report.perplexity_candidate - report.perplexity_reference) / increase if increase > 0 else 0.0
        )
        bounds = self._recipe.search
        met = kl_share <= bounds.max_kl_share and perplexity_share <= bounds.max_perplexity_share
        self.rows.append(
            {
                "recipe": name,
                "mean_kl": report.mean_kl,
                "kl_share": kl_share,
                "perplexity": report.perplexity_candidate,
                "perplexity_source": report.perplexity_reference,
                "perplexity_share": perplexity_share,
                "top1_agreement": report.top1_agreement,
                "positions": report.positions,
                "bytes": result.bytes_out,
                "bf16_share": self._bf16_share(recipe),
                "seconds": made_seconds,
                "met": met,
                "chosen": False,
            }
        )
        self._made.append((result, folder))
        logger.info("%s: %.0f %% of plain rounding's KL", name, 100 * kl_share)
        return met

    def _make(self, recipe: Recipe) -> tuple[QuantizeResult, Path]:
        """The candidate's checkpoint, from an interrupted search or made now."""
        key = work_identity(self._state, recipe.digest())
        folder = self._folder / key[:16]
        kept = self._folder / f"{key[:16]}.json"
        if folder.exists() and kept.exists():
            return _result(json.loads(kept.read_text())), folder
        if folder.exists():
            shutil.rmtree(folder)
        result = self._quantize(self._reader.directory, folder, recipe)
        fresh = kept.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(result)))
        fresh.replace(kept)
        return result, folder

    def _bf16_share(self, recipe: Recipe) -> float:
        """The part of the Linear weights (the LM head aside) that stays as it is."""
        modules = linear_modules(self._reader.config)
        ignored = set(recipe_ignored_modules(recipe, self._reader.config))
        sizes = {name: rows * columns for name, (rows, columns) in modules.items() if name != "lm_head"}
        return sum(size for name, size in sizes.items() if name in ignored) / sum(sizes.values())

    def spend_bf16(self, recipe: Recipe) -> None:
        """Leave the Linears with the most noise per byte in BF16: half the budget first, then all of it."""
        budget = self._recipe.search.max_bf16_share
        if budget <= 0:
            return
        ranked = noisiest_linears(self._made[-1][0].layers)
        sizes = {name: rows * columns for name, (rows, columns) in linear_modules(self._reader.config).items()}
        whole = sum(size for name, size in sizes.items() if name != "lm_head")
        for part in (budget / 2, budget):
            chosen: list[str] = []
            spent = 0
            for name in ranked:
                if spent + sizes[name] <= part * whole:
                    chosen.append(name)
                    spent += sizes[name]
            if not chosen:
                continue
            schemes = (*recipe.schemes, ModuleScheme(targets=tuple(chosen), scheme="bf16"))
            variant = recipe.model_copy(update={"schemes": schemes})
            try:
                met = self.consider(f"rotated, {len(chosen)} Linears in BF16", variant)
            except RecipeError as error:
                logger.warning("%s", error)
                continue
            if met:
                return

    def best(self) -> tuple[dict[str, Any], QuantizeResult, Path]:
        """The candidate that met the bounds, or the one with the least KL."""
        order = sorted(range(len(self.rows)), key=lambda n: (not self.rows[n]["met"], self.rows[n]["mean_kl"]))
        result, folder = self._made[order[0]]
        return self.rows[order[0]], result, folder


def noisiest_linears(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Module names by the noise their layer's site is predicted to leave, most first."""
    noise = []
    for layer in layers:
        for site in layer["sites"]:
            for linear in layer["linears"]:
                if linear["site"] == site["site"]:
                    noise.append((site["sqnr_after_db"], f"model.layers.{layer['layer']}.{linear['name']}"))
    return [name for _, name in sorted(noise)]


def _result(values: Mapping[str, Any]) -> QuantizeResult:
    return QuantizeResult(**{**values, "errors": [TensorError(**error) for error in values["errors"]]})
