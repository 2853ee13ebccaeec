"""The quality step: the staged model, as the CPU executor runs it, against the BF16 source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from prefect import task
from torch import Tensor
from transformers import AutoTokenizer

from quantize.quality import evaluate, greedy_continuation
from quantize.texts import evaluation_text
from quantize.transformers_model import LogitsFn, reference_logits_fn
from serving.executor import open_executor
from serving.executor.base import Chunk, Executor
from tasks import progress
from tasks.caching import STEP_TASK
from tasks.steps import StepRecord, run_step, step_key, write_json

EVALUATION_TOKENS = 2048
WINDOW_TOKENS = 512
GREEDY_TOKENS = 48
GREEDY_PROMPT = "The history of the city begins with"
PAGE_TOKENS = 128


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
    """Evaluate perplexity, KL, top-1 agreement and a greedy continuation; facts: the report as JSON values."""

    def build(out: Path) -> dict[str, Any]:
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokens = torch.tensor(tokenizer(evaluation_text())["input_ids"][:max_tokens], dtype=torch.int64)
        prompt = tokenizer(GREEDY_PROMPT)["input_ids"]
        reference = reference_logits_fn(source)
        window_pages = (WINDOW_TOKENS + PAGE_TOKENS - 1) // PAGE_TOKENS
        executor = open_executor(slabs, kind="cpu", num_pages=window_pages)
        try:
            candidate = executor_logits_fn(executor)
            report = evaluate(
                tokens,
                reference,
                _counting(candidate, len(tokens)),
                window_tokens=min(WINDOW_TOKENS, executor.max_context_tokens),
            )
            continuations = {
                "prompt": GREEDY_PROMPT,
                "reference": tokenizer.decode(greedy_continuation(reference, prompt, GREEDY_TOKENS)),
                "candidate": tokenizer.decode(greedy_continuation(candidate, prompt, GREEDY_TOKENS)),
            }
        finally:
            executor.close()
        facts = {**asdict(report), "greedy": continuations}
        out.mkdir()
        write_json(out / "quality.json", facts)
        return facts

    return run_step(work, "quality", key, build)


def _counting(fn: LogitsFn, total_tokens: int) -> Callable[[Tensor], Tensor]:
    done = 0

    def counted(window: Tensor) -> Tensor:
        nonlocal done
        result = fn(window)
        done += len(window)
        progress.advance(min(done, total_tokens), total_tokens)
        return result

    return counted


@task(name="measure quality", **STEP_TASK)
def quality_step(step: str, key: str, work: str, source: str, slabs: str, max_tokens: int) -> StepRecord:
    """Prefect task over `measure_quality`, cached under `key`."""
    return measure_quality(Path(work), key, Path(source), Path(slabs), max_tokens)
