"""The quality step: the staged model, as the CPU executor runs it, against the BF16 source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task
from torch import Tensor

from quantize.activation_statistics import activation_statistics
from quantize.quality import compare, greedy_continuation, summarize
from quantize.quality_findings import QualityFindings, findings_of
from quantize.quality_run import GREEDY_PROMPT, GREEDY_TOKENS, checkpoint_bytes, load_tokenizer, text_tokens
from quantize.texts import evaluation_text
from quantize.transformers_model import LogitsFn, TransformersModel
from serving.executor import open_executor
from serving.executor.base import Chunk, Executor
from tasks import progress
from tasks.caching import STEP_TASK
from tasks.steps import StepRecord, run_step, step_key, write_json

EVALUATION_TOKENS = 2048
WINDOW_TOKENS = 512
PAGE_TOKENS = 128
FINDINGS_FILE = "findings.json"
EXECUTOR_NAME = "pypto-deploy's CPU executor"
BOUNDED_FIGURES = ("perplexity_ratio", "mean_kl", "top1_agreement")
"""Figures whose 95 % intervals are facts of the step; all others are in the findings."""


def quality_key(source_digest: str, slabs_digest: str, max_tokens: int) -> str:
    """Content key of the step: both models, the text (part of the code digest) and the number of tokens."""
    return step_key(
        "quality",
        ("quantize", "kernels", "serving"),
        source=source_digest,
        slabs=slabs_digest,
        max_tokens=max_tokens,
        window=WINDOW_TOKENS,
    )


def executor_logits_fn(executor: Executor) -> LogitsFn:
    """Logits of every position of a window, FP32 `[tokens, vocab]`, computed on the executor's first pages."""

    def logits(window: Tensor) -> Tensor:
        pages = range((len(window) + PAGE_TOKENS - 1) // PAGE_TOKENS)
        chunk = Chunk(token_ids=window.tolist(), start_position=0, pages=tuple(pages), logits="all")
        return executor.forward([chunk])

    return logits


def measure_quality(work: Path, key: str, source: Path, slabs: Path, max_tokens: int) -> StepRecord:
    """Compare the staged model with its source on the first `max_tokens` of the evaluation text.

    Facts: the figures of `quantize.quality.QualityReport` and `intervals`. The output folder holds `findings.json`,
    from which the report is drawn.
    """

    def build(out: Path) -> dict[str, Any]:
        tokenizer = load_tokenizer(source)
        tokens = text_tokens(tokenizer, evaluation_text(), max_tokens)
        prompt = tokenizer(GREEDY_PROMPT)["input_ids"]
        reference = TransformersModel(source)
        activations = activation_statistics(reference, [tokens[:WINDOW_TOKENS]])
        with opened_executor(slabs) as executor:
            logits = executor_logits_fn(executor)
            window_tokens = min(WINDOW_TOKENS, executor.max_context_tokens)
            figures = compare(tokens, reference.logits, logits, window_tokens, progress.advance)
            greedy = [greedy_continuation(model, prompt, GREEDY_TOKENS) for model in (reference.logits, logits)]
        found = findings_of(
            "W8A8",
            EXECUTOR_NAME,
            figures,
            tokens,
            tokenizer,
            window_tokens=window_tokens,
            greedy=(greedy[0], greedy[1]),
            layers_note="the executor gives no hidden states; `pypto-deploy quality` on the checkpoint compares layers",
        )
        findings = QualityFindings(
            source="BF16 source",
            ran_as="transformers, bfloat16 arithmetic",
            bytes=checkpoint_bytes(source),
            text="the evaluation text",
            tokens=len(tokens),
            window_tokens=window_tokens,
            positions=found.positions,
            perplexity=found.figures["perplexity_reference"],
            greedy_prompt=GREEDY_PROMPT,
            greedy=tokenizer.decode(greedy[0]),
            activations=tuple(activations),
            candidates=(found,),
        )
        out.mkdir()
        write_json(out / FINDINGS_FILE, findings.to_json())
        intervals = {name: found.figures[name] for name in BOUNDED_FIGURES}
        return {
            **asdict(summarize(figures)),
            "intervals": {name: [interval.low, interval.high] for name, interval in intervals.items()},
        }

    return run_step(work, "quality", key, build)


@contextmanager
def opened_executor(slabs: Path, window_tokens: int = WINDOW_TOKENS, kv: str = "bf16") -> Iterator[Executor]:
    """The CPU executor on `slabs` with room for one window and its cache kept as `kv` says, closed afterwards."""
    executor = open_executor(slabs, kind="cpu", num_pages=-(-window_tokens // PAGE_TOKENS), kv=kv)
    try:
        yield executor
    finally:
        executor.close()


@task(name="measure quality", **STEP_TASK)
def quality_step(step: str, key: str, work: str, source: str, slabs: str, max_tokens: int) -> StepRecord:
    """Prefect task over `measure_quality`, cached under `key`."""
    return measure_quality(Path(work), key, Path(source), Path(slabs), max_tokens)
