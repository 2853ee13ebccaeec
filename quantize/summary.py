"""What a checkpoint is, from its headers and JSON files alone: for people who want to know before they compute.

Works on broken checkpoints as far as they can be read: what is not known is None or empty, and why is in `problems`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantize.architecture import IGNORED_TENSOR, LM_HEAD, linear_modules
from quantize.checkpoint import CheckpointScan, scan_checkpoint
from quantize.errors import CheckpointError, RecipeError, printable
from quantize.gguf_header import read_gguf_header
from quantize.gguf_source import check_gguf
from quantize.json_files import read_json_object
from quantize.model_config import ModelConfig
from quantize.preflight import quantized_problems, source_problems
from quantize.recipe import RECIPE_NAME
from quantize.recipe_file import parse_recipe, parse_yaml, recipe_text

MAX_TOKENIZER_BYTES = 64 * 2**20


@dataclass(frozen=True)
class DtypeTotal:
    """How many tensors are of one dtype, and the bytes of their payloads."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class QuantizationSummary:
    """How a checkpoint is quantized: `int8_modules` of `linear_modules` hold INT8 codes, `ignored` are named not to."""

    method: str
    scheme: str
    int8_modules: int
    linear_modules: int | None
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """A checkpoint at a glance.

    `good_for` is what our preflight accepts it for: `quantize` (a source), `stage` (a W8A8 checkpoint), or None with
    the reasons in `problems`; `notes` are oddities that keep nobody from using it. `parameters` counts weights once:
    scales and a tied head's copy are left out. `shape` has sizes by `ModelConfig`'s names. `recipe` is the recipe it
    was made with, if stored.
    """

    path: str
    kind: Literal["checkpoint", "gguf"]
    family: str | None
    architecture: str | None
    shape: dict[str, int]
    parameters: int | None
    dtypes: dict[str, DtypeTotal]
    payload_bytes: int
    files: tuple[str, ...]
    quantization: QuantizationSummary | None
    tied: bool | None
    lm_head_stored: bool
    context_tokens: int | None
    rope: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: bool
    tokenizer: str | None
    tokenizer_ids: int | None
    recipe: Mapping[str, Any] | None
    good_for: Literal["quantize", "stage"] | None
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


def _shape(config: ModelConfig) -> dict[str, int]:
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    return {name: getattr(config, name) for name in names}


def _rope(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"type": "default", "theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"type": "llama3", **vars(config.rope_scaling)}
    return rope


def _parameters(scan: CheckpointScan) -> int | None:
    if not scan.infos:
        return None
    tied = scan.config is not None and scan.config.tie_word_embeddings
    return sum(
        math.prod(info.shape)
        for name, info in scan.infos.items()
        if not name.endswith(("_scale", "_zero_point"))
        and IGNORED_TENSOR.fullmatch(name) is None
        and not (tied and name == LM_HEAD + ".weight")
    )


def _dtypes(scan: CheckpointScan) -> dict[str, DtypeTotal]:
    totals: dict[str, DtypeTotal] = {}
    for info in scan.infos.values():
        total = totals.get(info.dtype, DtypeTotal(0, 0))
        totals[info.dtype] = DtypeTotal(total.tensors + 1, total.bytes + info.nbytes)
    return dict(sorted(totals.items(), key=lambda entry: -entry[1].bytes))


def _quantization(scan: CheckpointScan) -> QuantizationSummary | None:
    if scan.quantization is None:
        return None
    honoured = not scan.quantization.problems
    modules = None if scan.config is None else len(linear_modules(scan.config))
    codes = sum(info.dtype == "I8" and name.endswith(".weight") for name, info in scan.infos.items())
    scheme = "W8A8: INT8 weights per channel, INT8 inputs per token" if honoured else "not one that is honoured here"
    return QuantizationSummary(scan.quantization.method, scheme, codes, modules, scan.quantization.ignore)


def _tokenizer(directory: Path, problems: list[str]) -> tuple[str | None, int | None, bool]:
    """Name of the tokenizer's class or file, how many ids it has if it is a `tokenizer.json`, and any chat template."""
    name, count, template = None, None, (directory / "chat_template.jinja").is_file()
    for file_name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        path = directory / file_name
        if not path.is_file():
            continue
        name = name or file_name
        if path.suffix != ".json":
            continue
        try:
            content = read_json_object(path, MAX_TOKENIZER_BYTES)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if file_name == "tokenizer_config.json":
            name = str(content.get("tokenizer_class") or name)[:80]
            template = template or bool(content.get("chat_template"))
        else:
            count = _count_ids(content)
    return name, count, template or (directory / "chat_template.json").is_file()


def _count_ids(tokenizer: Mapping[str, Any]) -> int | None:
    """One more than the largest id of a parsed `tokenizer.json`; None when its form is another."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    added = tokenizer.get("added_tokens")
    ids = [entry.get("id") for entry in added if isinstance(entry, Mapping)] if isinstance(added, list) else []
    if isinstance(vocab, Mapping):
        ids += vocab.values()
    elif isinstance(vocab, list):
        ids.append(len(vocab) - 1)
    numbers = [number for number in ids if isinstance(number, int)]
    return max(numbers) + 1 if numbers else None


def _recipe(directory: Path, notes: list[str]) -> Mapping[str, Any] | None:
    """The recipe stored with the checkpoint, as its keys and values; one that cannot be read is noted."""
    path = directory / RECIPE_NAME
    if not path.is_file():
        return None
    try:
        content = parse_yaml(recipe_text(path), str(path), aliases=False)  # no recipe of ours has any
        return parse_recipe(content, str(path)).model_dump(mode="json")
    except RecipeError as error:
        notes.append(printable(f"{path}: the stored recipe cannot be read: {str(error)[:300]}"))
        return None


def summarize_checkpoint(directory: Path) -> tuple[Summary, CheckpointScan]:
    """Describe a checkpoint directory; the scan comes along for the rules of readers.

    Raises CheckpointError when there is nothing to describe: no directory, or neither configuration nor tensors.
    """
    scan = scan_checkpoint(directory)
    if not scan.raw_config and not scan.infos:
        raise CheckpointError(f"{directory}: not a checkpoint that can be described", scan.problems)
    config = scan.config
    aside: list[str] = []
    notes: list[str] = []
    tokenizer, tokenizer_ids, template = _tokenizer(directory, aside)
    recipe = _recipe(directory, notes)
    if config is not None and tokenizer_ids is not None and tokenizer_ids > config.vocab_size:
        notes.append(f"the tokenizer has {tokenizer_ids} ids, the model's vocabulary {config.vocab_size}")
    if tokenizer is None:
        notes.append("there is no tokenizer: the model can be quantized and staged, but serves token ids only")
    quantized = scan.quantization is not None
    problems = [*(quantized_problems(scan) if quantized else source_problems(scan)), *aside]
    told = CheckpointError("", problems).problems
    summary = Summary(
        path=str(directory),
        kind="checkpoint",
        family=config.family if config else None,
        architecture=config.architecture if config else str(scan.raw_config.get("architectures"))[:80],
        shape=_shape(config) if config else {},
        parameters=_parameters(scan),
        dtypes=_dtypes(scan),
        payload_bytes=sum(info.nbytes for info in scan.infos.values()),
        files=tuple(sorted({info.file.name for info in scan.infos.values()})),
        quantization=_quantization(scan),
        tied=config.tie_word_embeddings if config else None,
        lm_head_stored=LM_HEAD + ".weight" in scan.infos,
        context_tokens=config.max_position_tokens if config else None,
        rope=_rope(config) if config else {},
        eos_token_ids=config.eos_token_ids if config else (),
        bos_token_id=config.bos_token_id if config else None,
        chat_template=template,
        tokenizer=tokenizer,
        tokenizer_ids=tokenizer_ids,
        recipe=recipe,
        good_for=None if problems else ("stage" if quantized else "quantize"),
        problems=told,
        notes=tuple(notes),
    )
    return summary, scan


def summarize_gguf(path: Path) -> Summary:
    """Describe a GGUF file from its header. Raises CheckpointError when it is none, or damaged."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    header = read_gguf_header(path)
    metadata = header.metadata
    architecture = str(metadata.get("general.architecture"))
    totals: dict[str, DtypeTotal] = {}
    for shape, kind in header.tensors.values():
        elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        name = GGMLQuantizationType(kind).name
        total = totals.get(name, DtypeTotal(0, 0))
        totals[name] = DtypeTotal(total.tensors + 1, total.bytes + math.prod(shape) // elements * block_bytes)

    def number(key: str) -> int | None:
        value = metadata.get(f"{architecture}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    sizes = {
        "num_layers": number("block_count"),
        "hidden_size": number("embedding_length"),
        "num_heads": number("attention.head_count"),
        "num_kv_heads": number("attention.head_count_kv"),
        "head_dim": number("attention.key_length"),
        "intermediate_size": number("feed_forward_length"),
        "vocab_size": next(
            (shape[-1] for name, (shape, _) in header.tensors.items() if name == "token_embd.weight"), None
        ),
    }
    problems: tuple[str, ...] = ()
    try:
        check_gguf(path)
    except CheckpointError as error:
        problems = error.problems or (str(error),)
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return Summary(
        path=str(path),
        kind="gguf",
        family=architecture,
        architecture=architecture,
        shape={name: size for name, size in sizes.items() if size is not None},
        parameters=sum(math.prod(shape) for shape, _ in header.tensors.values()),
        dtypes=dict(sorted(totals.items(), key=lambda entry: -entry[1].bytes)),
        payload_bytes=sum(total.bytes for total in totals.values()),
        files=(path.name,),
        quantization=None,
        tied="output.weight" not in header.tensors,
        lm_head_stored="output.weight" in header.tensors,
        context_tokens=number("context_length"),
        rope={"type": metadata.get(f"{architecture}.rope.scaling.type", "default")}
        | ({"theta": theta} if (theta := metadata.get(f"{architecture}.rope.freq_base")) is not None else {}),
        eos_token_ids=(eos,) if isinstance(eos, int) else (),
        bos_token_id=bos if isinstance(bos, int) else None,
        chat_template="tokenizer.chat_template" in metadata,
        tokenizer=str(metadata["tokenizer.ggml.model"])[:80] if "tokenizer.ggml.model" in metadata else None,
        tokenizer_ids=None,
        recipe=None,
        good_for=None if problems else "quantize",
        problems=problems,
    )
