"""Compare candidates with the source they were made from: load, run, and collect the findings.

The source stays loaded; candidates are loaded one after the other, so at most two models are in memory. With more than
one candidate the source's logits are kept on disk where there is room, else computed again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantize.activation_statistics import activation_statistics
from quantize.checkpoint import CheckpointReader
from quantize.errors import CheckpointError, QuantizeError
from quantize.layer_errors import LayerError, layer_errors
from quantize.quality import DEFAULT_WINDOW_TOKENS, compare, greedy_continuation
from quantize.quality_findings import CandidateFindings, QualityFindings, Tokenizer, findings_of
from quantize.transformers_model import LogitsFn, TransformersModel
from quantize.weight_errors import weight_errors

GREEDY_PROMPT = "The history of the city begins with"
GREEDY_TOKENS = 48
INSPECTED_WINDOWS = 2
"""Windows whose hidden states and activations are looked at; their averages over tokens settle quickly."""
Progress = Callable[[int, int], None]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to compare: its name in the report, its directory, and how it is run.

    `open_logits`, when given, yields the logits function that runs it instead of transformers, and `ran_as` says what
    that is; hidden states are then out of reach.
    """

    name: str
    directory: Path
    open_logits: Callable[[], AbstractContextManager[LogitsFn]] | None = None
    ran_as: str = ""


@dataclass(frozen=True)
class QualityOptions:
    """What to evaluate on: a text, its name, how much of it, and the arithmetic of models run by transformers.

    FP32 is the default: the source's own BF16 arithmetic already has a mean KL of 0.0008 on the sample against exact
    sums, which a good candidate's error comes near, and BF16 products are slow on CPUs without support for them.
    """

    text: str
    text_name: str
    max_tokens: int | None = None
    window_tokens: int = DEFAULT_WINDOW_TOKENS
    dtype: torch.dtype = torch.float32


def measure(
    source: Path,
    candidates: Sequence[Candidate],
    options: QualityOptions,
    progress: Progress = lambda done, total: None,
    note: Note = lambda text: None,
) -> QualityFindings:
    """Compare every candidate with `source` on the same tokens.

    `progress(done, total)` counts tokens of all candidates, `note` names what is going on. Raises CheckpointError or
    QuantizeError, before a model is loaded, for directories that hold no checkpoint, models of another vocabulary, or
    windows longer than the model's context.
    """
    _check(source, candidates, options)
    note("reading the text")
    tokenizer = load_tokenizer(source)
    tokens = text_tokens(tokenizer, options.text, options.max_tokens)
    note("loading the source")
    model = TransformersModel(source, options.dtype)
    note("looking at the source's activations")
    activations = activation_statistics(model, _inspected(tokens, options))
    prompt: list[int] = tokenizer(GREEDY_PROMPT)["input_ids"]
    greedy = greedy_continuation(model.logits, prompt, GREEDY_TOKENS)
    found: list[CandidateFindings] = []
    with kept_logits(model.logits, len(tokens), model.embedding.shape[0], len(candidates)) as logits:
        reference = _Reference(source, model, logits, tokenizer, tokens, prompt, greedy)
        for number, candidate in enumerate(candidates):
            share = _Share(progress, number * len(tokens), len(candidates) * len(tokens))
            found.append(_measure_candidate(reference, candidate, options, share, note))
    return QualityFindings(
        source=source.name,
        ran_as=_arithmetic(options),
        bytes=checkpoint_bytes(source),
        text=options.text_name,
        tokens=len(tokens),
        window_tokens=options.window_tokens,
        positions=found[0].positions,
        perplexity=found[0].figures["perplexity_reference"],
        greedy_prompt=GREEDY_PROMPT,
        greedy=tokenizer.decode(greedy),
        activations=tuple(activations),
        candidates=tuple(found),
    )


@dataclass(frozen=True)
class _Reference:
    """The source as every candidate meets it."""

    directory: Path
    model: TransformersModel
    logits: LogitsFn
    tokenizer: Tokenizer
    tokens: Tensor
    prompt: list[int]
    greedy: list[int]


@dataclass(frozen=True)
class _Share:
    """One candidate's part of the progress of all."""

    progress: Progress
    done_before: int
    total: int

    def __call__(self, done: int, _: int) -> None:
        self.progress(self.done_before + done, self.total)


def _measure_candidate(
    reference: _Reference, candidate: Candidate, options: QualityOptions, progress: Progress, note: Note
) -> CandidateFindings:
    """Load, run and judge one candidate; its model is gone when this returns."""
    note(f"running {candidate.name}")
    with _opened(candidate, options.dtype) as (logits, model):
        figures = compare(reference.tokens, reference.logits, logits, options.window_tokens, progress)
        greedy = greedy_continuation(logits, reference.prompt, GREEDY_TOKENS)
        layers, layers_note = _layers(reference.model, model, _inspected(reference.tokens, options))
    note(f"intervals of {candidate.name}")
    return findings_of(
        candidate.name,
        candidate.ran_as or _arithmetic(options),
        figures,
        reference.tokens,
        reference.tokenizer,
        window_tokens=options.window_tokens,
        size_bytes=checkpoint_bytes(candidate.directory),
        greedy=(reference.greedy, greedy),
        layers=tuple(layers),
        layers_note=layers_note,
        weights=tuple(weight_errors(reference.directory, candidate.directory)),
    )


def _inspected(tokens: Tensor, options: QualityOptions) -> list[Tensor]:
    starts = range(0, min(len(tokens), INSPECTED_WINDOWS * options.window_tokens), options.window_tokens)
    return [tokens[start : start + options.window_tokens] for start in starts]


def _arithmetic(options: QualityOptions) -> str:
    return f"transformers, {str(options.dtype).removeprefix('torch.')} arithmetic"


def load_tokenizer(source: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError when there is none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{source}: its tokenizer cannot be loaded: {str(error)[:200]}") from error


def text_tokens(tokenizer: Tokenizer, text: str, max_tokens: int | None = None) -> Tensor:
    """The ids INT64 `[tokens]` of a text, cut to `max_tokens`. Raises QuantizeError for fewer than two."""
    ids = tokenizer(text, verbose=False)["input_ids"][:max_tokens]
    if len(ids) < 2:
        raise QuantizeError(f"found {len(ids)} tokens to evaluate on; expected two or more: give a longer text")
    return torch.tensor(ids, dtype=torch.int64)


def checkpoint_bytes(directory: Path) -> int:
    """The payload bytes of a checkpoint's tensors."""
    with CheckpointReader(directory) as reader:
        return sum(info.nbytes for info in reader.infos.values())


def _check(source: Path, candidates: Sequence[Candidate], options: QualityOptions) -> None:
    """Refuse what cannot be compared, from the configurations and headers alone."""
    if not candidates:
        raise QuantizeError("found no candidate; expected at least one checkpoint to compare with the source")
    with CheckpointReader(source) as reader:
        expected = reader.config
        if reader.quantization is not None:
            raise CheckpointError(f"{source}: found a quantized checkpoint; expected the unquantized SOURCE first")
    for candidate in candidates:
        with CheckpointReader(candidate.directory) as reader:
            if reader.config.vocab_size != expected.vocab_size:
                raise CheckpointError(
                    f"{candidate.directory}: found a vocabulary of {reader.config.vocab_size}, expected "
                    f"{expected.vocab_size} as in {source}; only models of one tokenizer can be compared"
                )
    if not 2 <= options.window_tokens <= expected.max_position_tokens:
        raise QuantizeError(
            f"found windows of {options.window_tokens} tokens; expected 2 to {expected.max_position_tokens}, "
            "the context of the model"
        )


def _layers(
    reference: TransformersModel, model: TransformersModel | None, windows: Sequence[Tensor]
) -> tuple[list[LayerError], str | None]:
    if model is None:
        return [], "not run by transformers, so there are no hidden states to compare"
    try:
        return layer_errors(reference, model, windows), None
    except QuantizeError as error:
        return [], str(error)


@contextmanager
def _opened(candidate: Candidate, dtype: torch.dtype) -> Iterator[tuple[LogitsFn, TransformersModel | None]]:
    if candidate.open_logits is not None:
        with candidate.open_logits() as logits:
            yield logits, None
        return
    model = TransformersModel(candidate.directory, dtype)
    yield model.logits, model


@contextmanager
def kept_logits(logits: LogitsFn, tokens: int, vocab: int, uses: int) -> Iterator[LogitsFn]:
    """`logits`, computed once a window and read from a temporary folder from then on, if that pays and fits."""
    needed_bytes = tokens * vocab * 4
    if uses < 2 or shutil.disk_usage(tempfile.gettempdir()).free < 2 * needed_bytes:
        yield logits
        return
    with tempfile.TemporaryDirectory(prefix="pypto-deploy-") as folder:
        kept: dict[bytes, Path] = {}

        def remembered(window: Tensor) -> Tensor:
            key = window.numpy().tobytes()
            if key not in kept:
                path = Path(folder) / f"{len(kept)}.pt"
                torch.save(logits(window), path)
                kept[key] = path
            found: Tensor = torch.load(kept[key], mmap=True)
            return found

        yield remembered
