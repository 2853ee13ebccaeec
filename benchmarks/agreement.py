"""How closely W8A8 implementations agree with the BF16 source, and with each other.

    python benchmarks/agreement.py SOURCE W8A8 SLABS [--tokens N] [--window N] [--json FILE]

SOURCE is the BF16 checkpoint, W8A8 its quantized checkpoint, SLABS what was staged from that. Compared on the text that
releases are evaluated on:

- `ours`: the CPU executor on the slabs;
- `tf-bf16`, `tf-fp32`: transformers on the W8A8 checkpoint (compressed-tensors: activations quantized per token on the
  grid amax / 127.5, scale in the model's dtype), computing in that dtype;
- variants that tell causes apart, all computing in FP32 on exactly the stored codes and scales:
  `weights-only` leaves activations alone; `contract` quantizes them by this project's rule (BF16 value, amax / 127,
  FP32 scale); `no-narrowing` is `contract` on the FP32 value; `grid-127.5` is `contract` on the other grid; `nudged` is
  `contract` with every input of a quantized module changed by one part in a million at random: the same
  implementation a second time, as far as anybody could tell.

Prints two tables: everything against the source, and pairs of implementations. KL is in nats, the row's model against
the column's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantize.numerics import quantize_activation
from quantize.quality import QualityReport, evaluate
from quantize.quiet import quiet_transformers
from quantize.texts import evaluation_text
from quantize.transformers_model import LogitsFn, reference_logits_fn
from serving.executor import open_executor
from serving.executor.base import PAGE_TOKENS, Chunk

NUDGE = 1e-6
Rounding = Callable[[Tensor], Tensor]


def round_by_contract(values: Tensor) -> Tensor:
    """What a quantized module sees of an input under this project's rule, dequantized, FP32."""
    codes, scale = quantize_activation(values.to(torch.bfloat16))
    return codes * scale


def round_without_narrowing(values: Tensor) -> Tensor:
    """The same from the FP32 value."""
    codes, scale = quantize_activation(values)
    return codes * scale


def round_on_wide_grid(values: Tensor) -> Tensor:
    """The BF16 value on compressed-tensors' grid: amax / 127.5, codes from -128 to 127."""
    narrowed = values.to(torch.bfloat16).to(torch.float32)
    scale = narrowed.abs().amax(dim=-1, keepdim=True).clamp_min(1e-4) / 127.5
    return torch.round(narrowed / scale).clamp_(-128, 127) * scale


def round_nudged(generator: torch.Generator) -> Rounding:
    """`round_by_contract` of a value changed by about `NUDGE` of itself."""

    def nudged(values: Tensor) -> Tensor:
        noise = torch.randn(values.shape, generator=generator)
        return round_by_contract(values * (1 + NUDGE * noise))

    return nudged


def variant_logits_fn(checkpoint: Path, rounding: Rounding | None) -> LogitsFn:
    """Transformers in FP32 on the stored codes and scales, with `rounding` in place of its own activation handling."""
    with quiet_transformers(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    quantized = [module for module in model.modules() if getattr(module, "quantization_scheme", None) is not None]
    if not quantized:
        raise SystemExit(f"{checkpoint}: transformers sees no quantized module in it")
    for module in quantized:
        if module.weight.dtype != torch.float32:
            raise SystemExit(f"{checkpoint}: expected unpacked FP32 weights, found {module.weight.dtype}")
        module.quantization_enabled = False
        if rounding is not None:
            module.register_forward_pre_hook(lambda _module, inputs: (rounding(inputs[0]),))

    def logits(window: Tensor) -> Tensor:
        with torch.inference_mode():
            output: Tensor = model(input_ids=window[None], use_cache=False).logits[0]
        return output

    return logits


def executor_logits_fn(slabs: Path, window_tokens: int) -> LogitsFn:
    """Logits of a window as the CPU executor computes them."""
    pages = tuple(range(math.ceil(window_tokens / PAGE_TOKENS)))
    executor = open_executor(slabs, kind="cpu", num_pages=len(pages))
    return lambda window: executor.forward([Chunk(window.tolist(), 0, pages, "all")])


def recorded(make: Callable[[], LogitsFn], windows: list[Tensor]) -> dict[int, Tensor]:
    """Each window's logits, by the window's first position; the model is gone afterwards."""
    model = make()
    starts = [sum(len(window) for window in windows[:index]) for index in range(len(windows))]
    return {start: model(window) for start, window in zip(starts, windows, strict=True)}


def replay(logits: dict[int, Tensor]) -> LogitsFn:
    """A logits function that gives the recorded windows in their order."""
    remaining = iter(logits.values())
    return lambda window: next(remaining)


def table(title: str, rows: list[tuple[str, QualityReport]]) -> str:
    """Aligned lines: name, KL, p99 KL, top-1 agreement, perplexity."""
    lines = [f"{title:<34}{'mean KL':>10}{'p99 KL':>10}{'top-1':>9}{'perplexity':>12}"]
    for name, report in rows:
        lines.append(
            f"{name:<34}{report.mean_kl:>10.4f}{report.p99_kl:>10.4f}{report.top1_agreement:>9.4f}"
            f"{report.perplexity_candidate:>12.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Record every implementation's logits, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("w8a8", type=Path)
    parser.add_argument("slabs", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--json", type=Path, help="write all figures here too")
    options = parser.parse_args()
    ids = AutoTokenizer.from_pretrained(options.source)(evaluation_text())["input_ids"][: options.tokens]
    tokens = torch.tensor(ids, dtype=torch.int64)
    windows = [tokens[start : start + options.window] for start in range(0, len(tokens), options.window)]
    w8a8: Path = options.w8a8
    nudged = round_nudged(torch.Generator().manual_seed(0))
    makers: dict[str, Callable[[], LogitsFn]] = {
        "source-bf16": lambda: reference_logits_fn(options.source),
        "source-fp32": lambda: reference_logits_fn(options.source, torch.float32),
        "ours": lambda: executor_logits_fn(options.slabs, options.window),
        "tf-bf16": lambda: reference_logits_fn(w8a8),
        "tf-fp32": lambda: reference_logits_fn(w8a8, torch.float32),
        "weights-only": lambda: variant_logits_fn(w8a8, None),
        "contract": lambda: variant_logits_fn(w8a8, round_by_contract),
        "nudged": lambda: variant_logits_fn(w8a8, nudged),
        "no-narrowing": lambda: variant_logits_fn(w8a8, round_without_narrowing),
        "grid-127.5": lambda: variant_logits_fn(w8a8, round_on_wide_grid),
    }
    logits = {name: recorded(make, windows) for name, make in makers.items()}
    figures: dict[str, Any] = {}

    def compare(reference: str, candidate: str) -> tuple[str, QualityReport]:
        report = evaluate(tokens, replay(logits[reference]), replay(logits[candidate]), options.window)
        figures[f"{candidate} against {reference}"] = asdict(report)
        return candidate if reference == "source-bf16" else f"{candidate} against {reference}", report

    own = [compare("source-bf16", name) for name in makers]
    pairs = [
        compare(*pair)
        for pair in (
            ("tf-bf16", "ours"),
            ("tf-fp32", "ours"),
            ("tf-bf16", "tf-fp32"),
            ("contract", "ours"),
            ("contract", "nudged"),
            ("contract", "no-narrowing"),
            ("contract", "grid-127.5"),
            ("tf-fp32", "grid-127.5"),
            ("tf-fp32", "weights-only"),
        )
    ]
    print(f"{own[0][1].positions} positions in windows of {options.window} tokens\n")
    print(table("against the source in BF16", own) + "\n")
    print(table("against each other", pairs))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
