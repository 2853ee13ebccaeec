"""What a comparison found, as data: one source, one or more candidates, everything a report shows.

`to_json` is what `quality.json` holds; plots and pages are made from that alone, so a report can be drawn again from
the file. Figures that are not finite become null there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from quantize.activation_statistics import ActivationStatistics
from quantize.confidence import Interval
from quantize.layer_errors import LayerError
from quantize.quality import PositionFigures, first_difference, quality_intervals
from quantize.weight_errors import WeightError

WORST_POSITIONS = 12
CONTEXT_TOKENS = 24
CURVE_POINTS = 160

Tokenizer = Any
"""A transformers tokenizer; its classes have no common typed base."""


@dataclass(frozen=True)
class Guess:
    """A likely next token by a model: the token as text, and its probability."""

    token: str
    probability: float


@dataclass(frozen=True)
class WorstPosition:
    """A position of large divergence: the text before it, its next token, and what both models expected.

    Losses are in nats; `position` is the index of the next token in the text.
    """

    position: int
    context: str
    expected: str
    kl: float
    loss_reference: float
    loss_candidate: float
    reference: tuple[Guess, ...]
    candidate: tuple[Guess, ...]


@dataclass(frozen=True)
class Continuation:
    """A candidate's greedy continuation beside the reference's.

    `text` is `same` (what both wrote) followed by `own`; `diverges_at` counts tokens, None when all are the same.
    """

    text: str
    same: str
    own: str
    diverges_at: int | None


@dataclass(frozen=True)
class CandidateFindings:
    """A candidate against the source.

    `figures` are those of `quality.QualityReport` with their intervals; `kl_curve` are pairs of a divergence and the
    share of positions with as large a one. `layers` is empty where no hidden states were to be had, and `layers_note`
    says why. `bytes` is the size of its tensors.
    """

    name: str
    ran_as: str
    bytes: int | None
    positions: int
    figures: dict[str, Interval]
    kl_curve: tuple[tuple[float, float], ...]
    worst: tuple[WorstPosition, ...]
    greedy: Continuation | None
    layers: tuple[LayerError, ...] = ()
    layers_note: str | None = None
    weights: tuple[WeightError, ...] = ()


@dataclass(frozen=True)
class QualityFindings:
    """A source and its candidates, measured on the same positions of the same text."""

    source: str
    ran_as: str
    bytes: int | None
    text: str
    tokens: int
    window_tokens: int
    positions: int
    perplexity: Interval
    greedy_prompt: str
    greedy: str
    activations: tuple[ActivationStatistics, ...]
    candidates: tuple[CandidateFindings, ...]

    def to_json(self) -> dict[str, Any]:
        """The findings as values that JSON can hold."""
        values: dict[str, Any] = _finite(asdict(self))
        return values


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def findings_of(
    name: str,
    ran_as: str,
    figures: PositionFigures,
    tokens: Tensor,
    tokenizer: Tokenizer,
    *,
    window_tokens: int,
    size_bytes: int | None = None,
    greedy: tuple[Sequence[int], Sequence[int]] | None = None,
    **measured: Any,
) -> CandidateFindings:
    """A candidate's findings from what was measured at every position of `tokens` INT64 `[tokens]`.

    `greedy` are the ids with which reference and candidate continued the prompt; `measured` are the fields `layers`,
    `layers_note` and `weights`. Computes the intervals, which takes seconds for ten thousand positions.
    """
    return CandidateFindings(
        name=name,
        ran_as=ran_as,
        bytes=size_bytes,
        positions=len(figures.kl),
        figures=quality_intervals(figures),
        kl_curve=_kl_curve(figures.kl),
        worst=_worst_positions(figures, tokens, tokenizer, window_tokens),
        greedy=continuation(*greedy, tokenizer) if greedy is not None else None,
        **measured,
    )


def continuation(reference: Sequence[int], candidate: Sequence[int], tokenizer: Tokenizer) -> Continuation:
    """Put two continuations (ids) side by side: the text they share, and the candidate's own after it."""
    split = first_difference(reference, candidate)
    text = tokenizer.decode(list(candidate))
    same = text if split is None else tokenizer.decode(list(candidate[:split]))
    if not text.startswith(same):  # a character's bytes may lie on both sides of the split
        same = ""
    return Continuation(text=text, same=same, own=text[len(same) :], diverges_at=split)


def _kl_curve(kl: Tensor) -> tuple[tuple[float, float], ...]:
    """Points of the share of positions above a divergence, dense in the upper tail; the last is one position."""
    ordered = kl.sort(descending=True).values
    count = len(ordered)
    steps = min(CURVE_POINTS, count)
    ranks = sorted({round(count ** (step / max(1, steps - 1))) for step in range(steps)}, reverse=True)
    return tuple((max(0.0, float(ordered[rank - 1])), rank / count) for rank in ranks)


def _worst_positions(
    figures: PositionFigures, tokens: Tensor, tokenizer: Tokenizer, window_tokens: int
) -> tuple[WorstPosition, ...]:
    worst = figures.kl.topk(min(WORST_POSITIONS, len(figures.kl))).indices.tolist()

    def guesses(ids: Tensor, probabilities: Tensor) -> tuple[Guess, ...]:
        return tuple(
            Guess(tokenizer.decode([token]), probability)
            for token, probability in zip(ids.tolist(), probabilities.tolist(), strict=True)
        )

    found = []
    for row in worst:
        position = int(figures.token[row])
        start = max(position - position % window_tokens, position - CONTEXT_TOKENS)
        found.append(
            WorstPosition(
                position=position,
                context=tokenizer.decode(tokens[start:position].tolist()),
                expected=tokenizer.decode([int(tokens[position])]),
                kl=float(figures.kl[row]),
                loss_reference=float(figures.loss_reference[row]),
                loss_candidate=float(figures.loss_candidate[row]),
                reference=guesses(figures.top_reference[row], figures.top_reference_p[row]),
                candidate=guesses(figures.top_candidate[row], figures.top_candidate_p[row]),
            )
        )
    return tuple(found)
