"""The verb `inspect`: what a checkpoint, GGUF file or bundle is, without reading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flows.cli.output import JSON_OPTION, FailedError, emit_json, emit_line, emit_table
from flows.settings import UsageError
from quantize.errors import printable

if TYPE_CHECKING:
    from quantize.readers import Acceptance
    from quantize.summary import Summary

BUNDLE_MANIFEST = "manifest.json"
BUNDLE_CHECKPOINT = "checkpoint"


class ReaderName(StrEnum):
    """Choices of `--for`: whose loader to hold a checkpoint against."""

    vllm = "vllm"
    vllm_ascend = "vllm-ascend"
    pypto_serving = "pypto-serving"


FOR_OPTION = typer.Option(None, "--for", help="Another program that is to load the checkpoint; may be repeated.")


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command()(inspect)


def inspect(
    source: Path = typer.Argument(..., metavar="DIR|FILE.gguf", help="Checkpoint directory, GGUF file or bundle."),
    readers: list[ReaderName] | None = FOR_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Say what a checkpoint is, whether it can be quantized or staged, and who else would load it.

    Exit code 0: it can be used (and loaded, with --for); 1: it is described, and has problems; 2: it cannot be read.
    """
    from quantize.readers import acceptance
    from quantize.summary import summarize_checkpoint, summarize_gguf

    verdicts: list[Acceptance] = []
    if source.is_file() and source.suffix == ".gguf":
        if readers:
            raise UsageError(f"{source} is a GGUF file, which no --for reader loads; quantize it first")
        summary = summarize_gguf(source)
    else:
        summary, scan = summarize_checkpoint(_checkpoint_of(source))
        verdicts = [acceptance(scan, reader.value) for reader in dict.fromkeys(readers or ())]
    if as_json:
        accepted = [{**asdict(verdict), "accepted": verdict.accepted} for verdict in verdicts]
        emit_json({**asdict(summary), "readers": accepted})
    else:
        _print(summary, verdicts)
    refused = [verdict.reader for verdict in verdicts if not verdict.accepted]
    if summary.problems:
        raise FailedError(f"{summary.path}: {len(summary.problems)} problem(s)")
    if refused:
        raise FailedError(f"{summary.path}: would not suit {', '.join(refused)}")


def _checkpoint_of(directory: Path) -> Path:
    """The directory itself, or the checkpoint inside it when it is a bundle."""
    if (directory / BUNDLE_MANIFEST).is_file() and (directory / BUNDLE_CHECKPOINT).is_dir():
        return directory / BUNDLE_CHECKPOINT
    return directory


def _print(summary: Summary, verdicts: list[Acceptance]) -> None:
    rows = [[what, printable(value)] for what, value in _rows(summary).items() if value]
    emit_table(summary.path, ["what", "value"], rows)
    for title, lines in (("Problems", summary.problems), ("Notes", summary.notes)):
        _print_list(title, lines)
    for verdict in verdicts:
        told = "accepts it" if verdict.accepted else "would not load it"
        _print_list(f"{verdict.reader} {told}", (*verdict.problems, *(f"note: {note}" for note in verdict.notes)), True)


def _print_list(title: str, lines: tuple[str, ...], always: bool = False) -> None:
    if lines or always:
        emit_line(title)
    for line in lines:
        emit_line(f"  - {printable(line)}")


def _rows(summary: Summary) -> Mapping[str, str]:
    """The summary in words, in reading order; an empty value is left out."""
    shape = summary.shape
    quantization = summary.quantization
    tied = {True: "tied to the embedding", False: "of its own", None: ""}[summary.tied]
    if summary.tied and summary.lm_head_stored:
        tied += " (a copy is stored)"
    rope = {key: value for key, value in summary.rope.items() if key != "type"}
    quantized = ""
    if quantization is not None:
        of = "" if quantization.linear_modules is None else f" of {quantization.linear_modules}"
        quantized = f"{quantization.method}, {quantization.scheme}; {quantization.int8_modules}{of} Linear modules INT8"
    return {
        "family": f"{summary.family or 'unknown'} ({summary.architecture})",
        "shape": ", ".join(f"{name} {size:,}" for name, size in shape.items()),
        "parameters": "" if summary.parameters is None else f"{summary.parameters:,}",
        "payload": f"{summary.payload_bytes:,} bytes in {len(summary.files)} file(s)",
        "dtypes": "; ".join(
            f"{dtype}: {total.tensors} tensors, {total.bytes:,} bytes" for dtype, total in summary.dtypes.items()
        ),
        "quantization": quantized or "none",
        "ignored": "" if quantization is None else _few(quantization.ignored),
        "LM head": tied,
        "context": "" if summary.context_tokens is None else f"{summary.context_tokens:,} tokens",
        "rope": ", ".join(
            [str(summary.rope.get("type", "")), *(f"{key} {_number(value)}" for key, value in rope.items())]
        ),
        "stop ids": ", ".join(str(number) for number in summary.eos_token_ids),
        "tokenizer": summary.tokenizer + _ids(summary.tokenizer_ids) if summary.tokenizer else "none",
        "chat template": "yes" if summary.chat_template else "no",
        "recipe": "" if summary.recipe is None else _recipe(summary.recipe),
        "good for": summary.good_for or "nothing as it is, see the problems",
    }


def _number(value: Any) -> str:
    return f"{value:,g}" if isinstance(value, float) else f"{value}"


def _ids(count: int | None) -> str:
    return "" if count is None else f", {count:,} ids"


def _few(names: tuple[str, ...], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _recipe(recipe: Mapping[str, Any]) -> str:
    """The keys that say how the weights were made."""
    told = [f"{key} {recipe[key]}" for key in ("algorithm", "arithmetic", "clip", "down", "reader") if key in recipe]
    return ", ".join([*told, "rotated"] if recipe.get("smoothing", {}).get("rotate") else told)
