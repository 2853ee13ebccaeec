"""`auto`: the cheapest recipe that leaves little enough of plain rounding's damage.

Candidates are tried in order of what they cost to make and change; each is a whole checkpoint beside the target,
judged against the source on calibration text that none of them was calibrated on. The first that meets the bounds is
put in place. When none does, the sites with the most predicted noise stay BF16, as far as the budget goes; after that
the best one found is taken, and the table says that the bounds were missed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.architecture import LM_HEAD, layer_prefix, linear_modules
from quantize.calibrated.candidates import CandidateFolder
from quantize.calibrated.run import check_head_ignored
from quantize.calibrated.simulate import compare_simulated, final_hidden
from quantize.calibration import calibration_windows, check_windows
from quantize.checkpoint import CheckpointReader, file_sha256
from quantize.errors import RecipeError
from quantize.identity import source_state, work_identity
from quantize.preflight import check_source
from quantize.quality import QualityReport, summarize
from quantize.recipe import ModuleScheme, Recipe, recipe_ignored_modules
from quantize.rtn import QuantizeResult, TensorError
from quantize.staging_folder import check_target
from quantize.streaming import Progress

HELD_OUT_TOKENS = 4096
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


def quantize_auto(
    source: Path, out: Path, recipe: Recipe, quantize: Quantizer, progress: Progress | None = None
) -> QuantizeResult:
    """Search, and put the checkpoint chosen in place as `out`; `search` of the result has a row for each candidate.

    `quantize(source, out, recipe)` makes one candidate. The checkpoint holds the recipe that makes its tensors again,
    and the table as `search.json` (without times). `progress(done, total)` counts candidates. Raises what `quantize`
    raises; an interrupted search goes on after the candidates that were finished.
    """
    started = time.monotonic()
    held_out_tokens = recipe.calibration.held_out_tokens or HELD_OUT_TOKENS
    calibration = recipe.calibration.model_copy(update={"held_out_tokens": held_out_tokens})
    recipe = recipe.model_copy(update={"calibration": calibration})
    tried = candidates(recipe)
    check_target(out)
    with check_source(source) as reader, torch.no_grad():
        check_head_ignored(recipe, reader.config)
        windows, held_out = calibration_windows(source, calibration)
        check_windows(held_out, source, reader.config)
        with CandidateFolder(out, _search_key(reader, recipe, windows, held_out)) as folder:
            judge = _Judge(reader, held_out, recipe, folder, quantize)
            for done, (name, variant) in enumerate(tried, 1):
                met = judge.consider(name, variant)
                if progress is not None:
                    progress(done, len(tried))
                if met:
                    break
            else:
                judge.spend_bf16()
            if progress is not None:
                progress(len(tried), len(tried))
            result = judge.choose()
        return replace(result, seconds=time.monotonic() - started)


def _search_key(reader: CheckpointReader, recipe: Recipe, *windows: Tensor) -> str:
    """A digest of all that candidates and their figures depend on; text counts by its ids, not by its path."""
    files = {path.name: file_sha256(path) for path in reader.sidecars}
    ids = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in windows]
    content = json.dumps([recipe.digest(), reader.raw_config, files, ids, torch.get_num_threads()], sort_keys=True)
    return work_identity(source_state(reader), content)


class _Judge:
    """Makes candidates and judges them; keeps rows and results of all, and the checkpoint of the best."""

    def __init__(
        self, reader: CheckpointReader, held_out: Tensor, recipe: Recipe, folder: CandidateFolder, quantize: Quantizer
    ) -> None:
        self._reader = reader
        self._held_out = held_out
        self._recipe = recipe
        self._folder = folder
        self._quantize = quantize
        self._hidden = final_hidden(reader, held_out)
        self._rows: list[dict[str, Any]] = []
        self._made: list[tuple[QuantizeResult, Recipe]] = []
        self._best = 0

    def consider(self, title: str, recipe: Recipe) -> bool:
        """Make and judge one candidate, unless an interrupted search did; whether it meets the bounds."""
        name = _name(recipe)
        record = self._folder.record(name)
        if record is None:
            started = time.monotonic()
            self._folder.drop(name)
            result = self._quantize(self._reader.directory, self._folder.path(name), recipe)
            made_seconds = time.monotonic() - started
            with CheckpointReader(self._folder.path(name)) as candidate:
                report = summarize(compare_simulated(self._reader, self._hidden, candidate, self._held_out))
            row = self._row(title, recipe, result, report, made_seconds)
            self._folder.save(name, {"result": asdict(result), "row": row})
        else:
            result, row = _result(record["result"]), record["row"]
        self._rows.append(row)
        self._made.append((result, recipe))
        latest, best = len(self._rows) - 1, self._best
        if latest and _rank(row) >= _rank(self._rows[best]):
            self._folder.drop(name)
        elif latest:
            self._folder.drop(_name(self._made[best][1]))
            self._best = latest
        logger.info("%s: %.0f %% of plain rounding's KL", title, 100 * row["kl_share"])
        return bool(row["met"])

    def _row(
        self, title: str, recipe: Recipe, result: QuantizeResult, report: QualityReport, made_seconds: float
    ) -> dict[str, Any]:
        """A candidate's line of the table; shares are of what the first candidate, plain rounding, loses."""
        row: dict[str, Any] = {
            "recipe": title,
            "mean_kl": report.mean_kl,
            "perplexity": report.perplexity_candidate,
            "perplexity_source": report.perplexity_reference,
            "top1_agreement": report.top1_agreement,
            "positions": report.positions,
            "bytes": result.bytes_out,
            "bf16_share": self._bf16_share(recipe),
            "seconds": made_seconds,
            "chosen": False,
        }
        base = self._rows[0] if self._rows else row
        row["kl_share"] = row["mean_kl"] / base["mean_kl"] if base["mean_kl"] else 0.0
        increase = base["perplexity"] - base["perplexity_source"]
        # On few tokens rounding may lower the perplexity by chance; then there is nothing to take a share of.
        row["perplexity_share"] = (row["perplexity"] - row["perplexity_source"]) / increase if increase > 0 else 0.0
        bounds = self._recipe.search
        row["met"] = row["kl_share"] <= bounds.max_kl_share and row["perplexity_share"] <= bounds.max_perplexity_share
        return row

    def _bf16_share(self, recipe: Recipe) -> float:
        """The part of the Linear weights (the LM head aside) that stays as it is."""
        sizes = self._sizes()
        ignored = set(recipe_ignored_modules(recipe, self._reader.config))
        return sum(size for name, size in sizes.items() if name in ignored) / sum(sizes.values())

    def _sizes(self) -> dict[str, int]:
        """Number of weights of every Linear but the LM head."""
        modules = linear_modules(self._reader.config)
        return {name: rows * columns for name, (rows, columns) in modules.items() if name != LM_HEAD}

    def spend_bf16(self) -> None:
        """Leave the noisiest sites of the best candidate in BF16: half the budget first, then all of it.

        Noise is known of candidates that smooth; when the best one does not, the last one stands in.
        """
        sizes = self._sizes()
        base = self._best if noisiest_sites(self._made[self._best][0].layers) else len(self._made) - 1
        result, recipe = self._made[base]
        sites, title = noisiest_sites(result.layers), self._rows[base]["recipe"]
        before: list[str] = []
        for part in (0.5, 1.0):
            budget = part * self._recipe.search.max_bf16_share * sum(sizes.values())
            chosen: list[str] = []
            for names in sites:
                if sum(sizes[name] for name in (*chosen, *names)) <= budget:
                    chosen += names
            if chosen == before:
                continue
            before = chosen
            schemes = (*recipe.schemes, ModuleScheme(targets=tuple(chosen), scheme="bf16"))
            variant = recipe.model_copy(update={"schemes": schemes})
            try:
                met = self.consider(f"{title}, {len(chosen)} Linears in BF16", variant)
            except RecipeError as error:
                logger.warning("%s", error)
                continue
            if met:
                return

    def choose(self) -> QuantizeResult:
        """Put the best candidate in place; a warning says when it misses the bounds."""
        row = self._rows[self._best]
        result, recipe = self._made[self._best]
        if not row["met"]:
            logger.warning(
                "no recipe left at most %.0f %% of plain rounding's KL and %.0f %% of its perplexity increase; %s is "
                "the best found, with %.0f %% and %.0f %%",
                100 * self._recipe.search.max_kl_share,
                100 * self._recipe.search.max_perplexity_share,
                row["recipe"],
                100 * row["kl_share"],
                100 * row["perplexity_share"],
            )
        row["chosen"] = True
        name = _name(recipe)
        if not self._folder.holds(name, result.digest):
            logger.warning("%s: its checkpoint is not what was recorded; it is made again", row["recipe"])
            self._folder.drop(name)
            result = self._quantize(self._reader.directory, self._folder.path(name), recipe)
        # Times would give every search a digest of its own.
        table = [{key: value for key, value in row.items() if key != "seconds"} for row in self._rows]
        digest = self._folder.commit(name, json.dumps({"rows": table}, indent=1) + "\n")
        return replace(result, digest=digest, search=self._rows)


def _name(recipe: Recipe) -> str:
    return recipe.digest()[:16]


def _rank(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Smaller is better: what meets the bounds, then what has the least KL."""
    return not row["met"], row["mean_kl"]


def noisiest_sites(layers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The quantized Linears of each site (they share a scheme in readers that fuse them), most predicted noise first.

    `layers` are the facts of calibrated layers; noise is relative to the site's output.
    """
    found = []
    for layer in layers:
        for site in layer["sites"]:
            names = [linear["name"] for linear in layer["linears"] if linear["site"] == site["site"]]
            found.append((site["sqnr_after_db"], [layer_prefix(layer["layer"]) + name for name in names]))
    return [names for _, names in sorted(found)]


def _result(values: Mapping[str, Any]) -> QuantizeResult:
    return QuantizeResult(**{**values, "errors": [TensorError(**error) for error in values["errors"]]})
