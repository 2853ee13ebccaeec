"""The verbs on weights alone: `quantize`, `stage`, `sample-model`. They need neither Prefect nor MLflow."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from flows import console
from flows.cli.inspect import ReaderName
from flows.cli.output import JSON_OPTION, emit_json, emit_line, emit_table
from flows.settings import UsageError


class Arithmetic(StrEnum):
    """Choices of `--arithmetic`."""

    fp32 = "fp32"
    compat = "compat"


class Down(StrEnum):
    """Choices of `--down`."""

    int8 = "int8"
    bf16 = "bf16"


class Abi(StrEnum):
    """Choices of `--abi`."""

    pypto_deploy = "pypto-deploy"
    pypto_lib = "pypto-lib"


class Preset(StrEnum):
    """Choices of `--preset`."""

    rtn = "rtn"
    smoothquant = "smoothquant"
    gptq = "gptq"
    both = "smoothquant+gptq"
    auto = "auto"


SEARCH_COLUMNS = ("recipe", "KL", "of rtn's", "perplexity", "of rtn's increase", "top-1", "MB", "seconds", "chosen")
SEARCH_KEYS = (
    "recipe", "mean_kl", "kl_share", "perplexity", "perplexity_share", "top1_agreement", "megabytes", "seconds",
    "chosen",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
    app.command()(quantize)
    app.command()(stage)
    app.command("sample-model")(sample_model)


def quantize(
    source: Path = typer.Argument(..., metavar="SRC", help="Checkpoint directory or .gguf file."),
    out: Path = typer.Argument(..., metavar="OUT", help="Folder to create."),
    recipe: Path | None = typer.Option(None, help="Recipe file (YAML)."),
    preset: Preset | None = typer.Option(
        None,
        "--preset",
        "--algorithm",
        help="Override the recipe: plain rounding, or one that calibrates; `auto` searches.",
    ),
    calibration: Path | None = typer.Option(
        None,
        help="Override the recipe: text to calibrate on, a .txt or .jsonl file or a folder [default: the package's].",
    ),
    arithmetic: Arithmetic | None = typer.Option(
        None, help="Override the recipe: `fp32` codes from the stored scale, `compat` is llm-compressor's."
    ),
    reader: ReaderName | None = typer.Option(
        None, "--for", help="Override the recipe: also suit the loader of this program (see `inspect --for`)."
    ),
    memory: str | None = typer.Option(
        None, help="Bound of this process's resident memory: bytes, or such as 600M or 2GiB [default: none; about 60M]."
    ),
    workers: int | None = typer.Option(None, min=1, help="Threads [default: the cores this process may use]."),
    max_shard_size: str | None = typer.Option(
        None, help="Cut the output's shards at this size, such as 5G [default: the source's sharding]."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Quantize a checkpoint to W8A8 (compressed-tensors int-quantized).

    Run it again after a kill, and it carries on after the tensors that were finished.
    """
    refuse_existing(out)
    from quantize.budget import parse_bytes
    from quantize.pipeline import quantize as run_recipe
    from quantize.recipe_file import load_recipe, parse_recipe

    chosen = load_recipe(recipe)
    options = {"algorithm": preset, "arithmetic": arithmetic, "reader": reader}
    overrides: dict[str, Any] = {key: value.value for key, value in options.items() if value is not None}
    if calibration is not None:
        overrides["calibration"] = {**chosen.calibration.model_dump(), "data": str(calibration)}
    if overrides:
        chosen = parse_recipe({**chosen.model_dump(mode="json"), **overrides}, "the recipe with these options")
    if calibration is not None and not chosen.calibrates:
        raise UsageError(f"--calibration {calibration}: algorithm {chosen.algorithm} reads no text; add --preset auto")
    if chosen.calibrates and (memory is not None or workers is not None):
        raise UsageError(
            f"--memory and --workers bound plain rounding; algorithm {chosen.algorithm} needs memory for a decoder "
            "layer and its activations, and uses torch's threads: leave them out (OMP_NUM_THREADS sets the threads)"
        )
    memory_bytes = None if memory is None else parse_bytes(memory)
    max_shard_bytes = None if max_shard_size is None else parse_bytes(max_shard_size)
    lines = console.ReleaseConsole()
    with tempfile.TemporaryDirectory(prefix="pypto-deploy-") as scratch:
        if source.is_file() and source.suffix == ".gguf":
            from quantize.gguf_source import convert_gguf

            with lines.step("convert GGUF") as line:
                source = convert_gguf(source, Path(scratch) / "source")
                line.outcome = "to a BF16 checkpoint"
        with lines.step("quantize") as line:
            result = run_recipe(
                source,
                out,
                chosen,
                line.advance if chosen.calibrates else console.TransferRate(line).advance,
                max_shard_bytes,
                memory_bytes=memory_bytes,
                workers=workers,
            )
            kept = f", {result.resumed} kept of an interrupted run" if result.resumed else ""
            line.outcome = f"{result.quantized} of {result.tensors} tensors to INT8{kept}"
    answer = {
        "out": str(out),
        "algorithm": chosen.algorithm,
        "arithmetic": chosen.arithmetic,
        "reader": chosen.reader,
        **asdict(result),
    }
    if as_json:
        emit_json(answer)
    else:
        if result.search:
            emit_table(
                "What auto tried, against the source on held-out calibration text",
                SEARCH_COLUMNS,
                [[{**row, "megabytes": row["bytes"] / 1e6}[key] for key in SEARCH_KEYS] for row in result.search],
            )
        emit_line(f"{out}: {result.bytes_in:,} bytes in, {result.bytes_out:,} out, digest {result.digest}")


def stage(
    checkpoint: Path = typer.Argument(..., metavar="CHECKPOINT", help="W8A8 checkpoint directory."),
    out: Path = typer.Argument(..., metavar="OUT", help="Folder to create."),
    down: Down | None = typer.Option(
        None, help="Which form of down_proj the checkpoint holds and the slabs get [default: int8]."
    ),
    abi: Abi = typer.Option(
        Abi.pypto_deploy, help="Whose kernels the slabs are for; pypto-lib's take a Qwen3 with down_proj in BF16."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Stage a W8A8 checkpoint into kernel-ready slabs."""
    refuse_existing(out)
    if abi is not Abi.pypto_deploy:
        _export(checkpoint, out, down, abi, as_json)
        return
    from kernels.staging import stage_checkpoint

    down = down or Down.int8
    with console.ReleaseConsole().step("stage") as line:
        result = stage_checkpoint(checkpoint, out, down=down.value, progress=line.advance)
        line.outcome = f"{len(result.tensors)} slabs"
    answer: dict[str, Any] = {"out": str(out), **asdict(result)}
    if as_json:
        emit_json(answer)
    else:
        emit_line(f"{out}: {len(result.tensors)} slabs, {result.bytes:,} bytes, digest {result.digest}")


def _export(checkpoint: Path, out: Path, down: Down | None, abi: Abi, as_json: bool) -> None:
    """Stage for another kernel library, whose contract says which form of down_proj it takes."""
    from kernels.abi_export import export_checkpoint

    if down is Down.int8:
        raise UsageError(
            f"--down int8 --abi {abi.value}: {abi.value} takes down_proj in BF16; leave --down out, and quantize the "
            "source with `down: bf16` in the recipe"
        )
    with console.ReleaseConsole().step(f"stage for {abi.value}") as line:
        result = export_checkpoint(checkpoint, out, abi.value, progress=line.advance)
        line.outcome = f"{len(result.tensors)} tensors"
    if as_json:
        emit_json({"out": str(out), **asdict(result)})
        return
    emit_line(f"{out}: {len(result.tensors)} tensors, {result.bytes:,} bytes, digest {result.digest}")
    emit_line(f"contract {result.contract}, fingerprint {result.fingerprint}")
    if retune := result.kernel_constants.get("retune"):
        emit_line(f"note: {retune}")


def sample_model(
    out: Path = typer.Argument(..., metavar="OUT", help="Folder to create."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Fetch the sample model (SmolLM2-135M-Instruct, Apache-2.0) as a BF16 checkpoint."""
    refuse_existing(out)
    from quantize.sample_model import fetch_sample_model

    with console.ReleaseConsole().step("sample model") as line:
        fetch_sample_model(out)
        line.outcome = str(out)
    if as_json:
        emit_json({"out": str(out)})
    else:
        emit_line(f"{out}: SmolLM2-135M-Instruct, BF16")


def refuse_existing(out: Path) -> None:
    """Raise `UsageError` when the output exists already; nothing written is ever replaced."""
    if out.exists():
        from quantize.staging_folder import sweep_finished

        sweep_finished(out)
        raise UsageError(f"{out} exists; expected a path to create. Choose another OUT or remove it first")
