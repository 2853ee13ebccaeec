"""The verb `quality`: how far quantized checkpoints are from their source, with a report; without Prefect or MLflow."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flows import console
from flows.cli.output import JSON_OPTION, STORE_OPTION, emit_json, emit_line, emit_table
from flows.cli.report_folder import report_folder, writing_reports
from flows.settings import UsageError, resolve_store
from kernels.kv_format import KvName

if TYPE_CHECKING:
    from kernels.contract import DownDtype
    from quantize.quality_run import Candidate
    from quantize.transformers_model import LogitsFn

DEFAULT_TOKENS = 8192


class Arithmetic(StrEnum):
    """Choices of `--dtype`."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Runner(StrEnum):
    """Choices of `--executor`."""

    transformers = "transformers"
    cpu = "cpu"


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command()(quality)


def quality(
    source: Path = typer.Argument(..., metavar="SOURCE", help="The unquantized checkpoint directory."),
    candidates: list[Path] = typer.Argument(..., metavar="CANDIDATE...", help="Quantized checkpoint directories."),
    previous: str | None = typer.Option(
        None, help="Compare with a previous release too: a bundle (digest, alias or folder) or a checkpoint directory."
    ),
    out: Path | None = typer.Option(None, help="Folder to create for quality.html, quality.json and the plots."),
    tokens: int = typer.Option(DEFAULT_TOKENS, min=2, help="Evaluate on the first N tokens of the text."),
    window: int = typer.Option(512, min=2, help="Tokens in a window; windows know nothing of each other."),
    text: Path | None = typer.Option(None, help="Evaluate on this UTF-8 text instead of the one that ships."),
    executor: Runner = typer.Option(
        Runner.transformers, help="What runs the candidates: `transformers`, or this project's `cpu` executor."
    ),
    kv: list[KvName] | None = typer.Option(
        None, help="With `--executor cpu`: how its cache keeps keys and values; several make a column each."
    ),
    dtype: Arithmetic = typer.Option(
        Arithmetic.float32, help="Arithmetic of models run by transformers; the source's weights are the same in both."
    ),
    store: str | None = STORE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Compare quantized checkpoints with their source: perplexity, KL, agreement, layers, outliers."""
    if kv and executor is not Runner.cpu:
        raise UsageError(
            f"--kv is a choice of this project's executor, found --executor {executor}; add --executor cpu"
        )
    import torch

    from quantize.quality_report import write_quality_report
    from quantize.quality_run import QualityOptions, measure
    from quantize.texts import evaluation_text, read_text

    options = QualityOptions(
        text=evaluation_text() if text is None else read_text(text),
        text_name="the evaluation text" if text is None else text.name,
        max_tokens=tokens,
        window_tokens=window,
        dtype=getattr(torch, dtype.value),
    )
    directories = [(_label(path, candidates), path) for path in candidates]
    if previous is not None:
        directories.append((f"previous ({Path(previous).name[:12]})", _previous_checkpoint(previous, store)))
    with report_folder(out):
        with console.ReleaseConsole().step("quality") as line:
            chosen = [
                _candidate(name, path, executor, window, kept.value)
                for name, path in directories
                for kept in kv or [KvName("bf16")]
            ]
            findings = measure(source, chosen, options, progress=line.advance, note=line.note).to_json()
            line.outcome = f"{findings['positions']:,} positions of {findings['text']}"
        if as_json:
            emit_json(findings)
        else:
            _print(findings)
        if out is not None:
            with writing_reports(out):
                write_quality_report(out, findings)
            if not as_json:
                emit_line(f"Report: {out / 'quality.html'}")


def _label(path: Path, candidates: list[Path]) -> str:
    """A candidate's name in the report: its folder's name, or as much of its path as tells it from the others."""
    name = path.resolve().name
    return name if sum(other.resolve().name == name for other in candidates) == 1 else str(path)


def _previous_checkpoint(reference: str, store: str | None) -> Path:
    """The checkpoint directory that `--previous` means: a checkpoint, a bundle's folder, or a bundle of the store."""
    folder = Path(reference)
    for checkpoint in (folder, folder / "checkpoint"):
        if (checkpoint / "config.json").is_file():
            return checkpoint
    from serving.store import BundleStore

    root = resolve_store(store).root
    if not root.is_dir():
        raise UsageError(
            f"--previous {reference}: found neither a checkpoint, a bundle's folder nor a store at {root}; expected a "
            "directory with config.json, or a digest or alias of a bundle in --store"
        )
    return BundleStore(root).resolve(reference).path / "checkpoint"


def _candidate(name: str, directory: Path, runner: Runner, window: int, kv: str) -> Candidate:
    from quantize.quality_run import Candidate

    if runner is Runner.transformers:
        return Candidate(name, directory)
    from tasks.quality import EXECUTOR_NAME

    label, ran_as = (name, EXECUTOR_NAME) if kv == "bf16" else (f"{name}, KV {kv}", f"{EXECUTOR_NAME}, KV {kv}")
    return Candidate(label, directory, lambda: _staged_logits(directory, window, kv), ran_as=ran_as)


@contextmanager
def _staged_logits(checkpoint: Path, window: int, kv: str) -> Iterator[LogitsFn]:
    """The CPU executor on `checkpoint`, staged into a temporary folder that is gone afterwards."""
    from kernels.staging import stage_checkpoint
    from tasks.quality import executor_logits_fn, opened_executor

    with tempfile.TemporaryDirectory(prefix="pypto-deploy-") as scratch:
        slabs = Path(scratch) / "slabs"
        stage_checkpoint(checkpoint, slabs, down=_down_form(checkpoint))
        with opened_executor(slabs, window, kv) as executor:
            yield executor_logits_fn(executor)


def _down_form(checkpoint: Path) -> DownDtype:
    """Which form of down_proj the checkpoint holds, by its first layer."""
    from quantize.checkpoint import CheckpointReader

    with CheckpointReader(checkpoint) as reader:
        info = reader.infos.get("model.layers.0.mlp.down_proj.weight")
    return "int8" if info is not None and info.dtype == "I8" else "bf16"


def _print(findings: dict[str, Any]) -> None:
    def with_range(interval: dict[str, Any], digits: int = 4) -> str:
        value, low, high = (
            "inf" if interval[key] is None else f"{interval[key]:.{digits}g}" for key in ("value", "low", "high")
        )
        return f"{value} ({low} to {high})"

    emit_table(
        f"Against {findings['source']}, perplexity {with_range(findings['perplexity'])}; "
        f"{findings['positions']:,} positions of {findings['text']}, 95 % intervals",
        ["candidate", "perplexity ratio", "mean KL", "99th percentile KL", "top-1 agreement", "same greedy tokens"],
        [
            [
                candidate["name"],
                with_range(candidate["figures"]["perplexity_ratio"], 5),
                with_range(candidate["figures"]["mean_kl"], 3),
                with_range(candidate["figures"]["p99_kl"], 3),
                with_range(candidate["figures"]["top1_agreement"]),
                "all" if candidate["greedy"]["diverges_at"] is None else candidate["greedy"]["diverges_at"],
            ]
            for candidate in findings["candidates"]
        ],
    )
