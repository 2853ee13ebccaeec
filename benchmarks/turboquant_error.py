"""What TurboQuant's formats cost: bytes, error against theory, and attention against that over a BF16 cache.

    python benchmarks/turboquant_error.py [--interpret] [--json]

For every format, on random vectors of 128 coordinates with heavy tails: the squared error of a value, relative to its
square, beside the Lloyd-Max distortion; of products of queries and keys, the error relative to |q|^2 |k|^2 / d beside
what theory expects (the distortion, or pi / 2 times that of one bit less with a sketch), and the slope against exact
products (1 less the distortion, or 1). Attention: the squared error of contexts over 256 tokens, relative to those over
BF16 keys and values, and the distance to decoding every key and value before attending, as the CPU executor does.

The figures are those of the goldens; with `--interpret` the two PyPTO programs run in the interpreter, the encoder
first and attention on what it wrote, and their contexts are compared with the golden's and with BF16 attention. Prints
a Markdown table, or JSON; exits with 1 when an error is off its theory by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

import torch
from torch import Tensor

from kernels.goldens import PAGE_TOKENS, paged_attention
from kernels.interpreter import Call, interpret
from kernels.kv_format import KV_FORMATS, KvFormat, parse_kv_format
from kernels.programs.turboquant_attention import TurboQuantAttention, TurboQuantAttentionSpec
from kernels.programs.turboquant_encode import TurboQuantEncode, TurboQuantEncodeSpec
from kernels.turboquant import TurboQuant, theoretical_mse
from kernels.turboquant_cache import encode_rows, read_rows, turboquant_attention, turn_queries

DIM, HEADS, KV_HEADS = 128, 4, 2
CONTEXT_TOKENS = 2 * PAGE_TOKENS
BATCH_ROWS = 4
VECTORS = 2048
SLACK = 0.1


def heavy_tails(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """BF16 vectors of many magnitudes with a few large coordinates."""
    values = torch.randn(rows, width, generator=generator) ** 3
    values *= torch.exp(torch.randn(rows, 1, generator=generator))
    return values.to(torch.bfloat16)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Squared error over the square of what is wanted."""
    difference = found.to(torch.float64) - wanted.to(torch.float64)
    return float(difference.square().sum() / wanted.to(torch.float64).square().sum())


def vector_errors(kv_format: KvFormat) -> dict[str, float]:
    """Error of values and of products with keys, each beside its theory."""
    generator = torch.Generator().manual_seed(1)
    keys = TurboQuant(DIM, kv_format.bits, sketch=kv_format.sketch, seed=2)
    values = TurboQuant(DIM, kv_format.bits, seed=3)
    x = heavy_tails(VECTORS, DIM, generator)
    q = torch.randn(64, DIM, generator=generator).to(torch.bfloat16)
    x_fp64 = x.to(torch.float64)
    decoded = values.round_trip(x.to(torch.float32)).to(torch.float64)
    value_error = float(((decoded - x_fp64).square().sum(1) / x_fp64.square().sum(1)).mean())
    read = read_rows(keys, *encode_rows(keys, x))[:, 0].to(torch.float64)
    exact = x_fp64 @ q.to(torch.float64).t() / x_fp64.norm(dim=1, keepdim=True) / q.to(torch.float64).norm(dim=1)
    found = read @ turn_queries(keys, q).to(torch.float64).t()
    found = found / x_fp64.norm(dim=1, keepdim=True) / q.to(torch.float64).norm(dim=1)
    bits = kv_format.bits
    return {
        "value_error": value_error,
        "value_theory": theoretical_mse(bits),
        "product_error": float((found - exact).square().mean() * DIM),
        "product_theory": math.pi / 2 * theoretical_mse(bits - 1) if kv_format.sketch else theoretical_mse(bits),
        "slope": float((found * exact).sum() / exact.square().sum()),
        "slope_theory": 1.0 if kv_format.sketch else 1 - theoretical_mse(bits),
    }


def attention_errors(kv_format: KvFormat, run_programs: bool) -> dict[str, float]:
    """Contexts over the kept cache against those over BF16, and against decoding first; of the programs, if asked."""
    generator = torch.Generator().manual_seed(4)
    keys = TurboQuant(DIM, kv_format.bits, sketch=kv_format.sketch, seed=5)
    values = TurboQuant(DIM, kv_format.bits, seed=6)
    k, v = (torch.randn(CONTEXT_TOKENS, KV_HEADS * DIM, generator=generator).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(BATCH_ROWS, HEADS, DIM, generator=generator).to(torch.bfloat16)
    positions = torch.full((BATCH_ROWS,), CONTEXT_TOKENS - 1)
    table = torch.tensor([[0, 1]]).expand(BATCH_ROWS, 2)
    exact = paged_attention(q, k, v, positions, table, KV_HEADS)
    found = turboquant_attention(q, (keys, *encode_rows(keys, k)), (values, *encode_rows(values, v)), positions, table)
    k_read, v_read = (
        codec.round_trip(x.to(torch.float32).view(-1, DIM)).view(x.shape) for codec, x in ((keys, k), (values, v))
    )
    decoded_first = paged_attention(q, k_read, v_read, positions, table, KV_HEADS)
    errors = {
        "attention_error": relative_error(found, exact),
        "decoded_first_error": relative_error(decoded_first, exact),
        "distance_to_decoded_first": relative_error(found, decoded_first),
    }
    if run_programs:
        made = interpreted(kv_format, keys, values, k, v, q)
        errors |= {
            "program_error": relative_error(made, exact),
            "program_to_golden": float((made.to(torch.float64) - found.to(torch.float64)).abs().max()),
        }
    return errors


def interpreted(kv_format: KvFormat, keys: TurboQuant, values: TurboQuant, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
    """Contexts that the two programs give: the encoder fills the caches from the rows, attention reads them."""
    pages = CONTEXT_TOKENS // PAGE_TOKENS
    encode = TurboQuantEncode(
        TurboQuantEncodeSpec(KV_HEADS, DIM, kv_format.bits, kv_format.sketch, CONTEXT_TOKENS, pages)
    )
    contexts = (CONTEXT_TOKENS,) * BATCH_ROWS
    attention = TurboQuantAttention(
        TurboQuantAttentionSpec(
            HEADS, KV_HEADS, DIM, BATCH_ROWS, BATCH_ROWS * pages, contexts, kv_format.bits, kv_format.sketch
        )
    )
    tensors = encode.shape_inputs() | {
        "k_rows": k,
        "v_rows": v,
        "k_matrices": keys.matrices,
        "v_matrices": values.matrices,
        "q_rows": q.view(-1, DIM),
        "context_tokens": torch.tensor(contexts, dtype=torch.int32),
        "block_table": torch.tensor([[0, 1]] * BATCH_ROWS, dtype=torch.int32),
    }
    calls = [
        Call(encode, {a.name: a.name for a in encode.arguments()}),
        Call(
            attention,
            {a.name: a.name for a in attention.arguments() if a.direction == "in"},
            {"context_rows": "context_rows"},
        ),
    ]
    return interpret(calls, tensors, ["context_rows"])["context_rows"].view(BATCH_ROWS, HEADS, DIM)


def measure(name: str, run_programs: bool) -> dict[str, Any]:
    """One format."""
    kv_format = parse_kv_format(name)
    if kv_format is None:
        return {"format": name, "token_bytes": 4 * DIM}
    keys = TurboQuant(DIM, kv_format.bits, sketch=kv_format.sketch)
    token_bytes = keys.row_bytes + TurboQuant(DIM, kv_format.bits).row_bytes
    found = {"format": name, "token_bytes": token_bytes, **vector_errors(kv_format)}
    return found | attention_errors(kv_format, run_programs)


def is_off(row: dict[str, Any]) -> bool:
    """Whether an error is not that of theory."""
    pairs = [(row[name], row[f"{name.rsplit('_', 1)[0]}_theory"]) for name in ("value_error", "product_error")]
    return any(abs(found / theory - 1) > SLACK for found, theory in pairs)


def main() -> int:
    """Measure every format and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="run the PyPTO programs too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(name, options.interpret) for name in KV_FORMATS]
    kept = [row for row in rows if "value_error" in row]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        heads = [
            "format",
            "bytes",
            "value",
            "theory",
            "product",
            "theory",
            "slope",
            "theory",
            "attention",
            "decoded first",
        ]
        heads += ["distance"] + (["programs", "to golden"] if options.interpret else [])
        print("| " + " | ".join(heads) + " |")
        print("|" + "---|" * len(heads))
        for row in kept:
            cells = [row["format"], str(row["token_bytes"])]
            cells += [f"{row[key]:.4f}" for key in ("value_error", "value_theory", "product_error", "product_theory")]
            cells += [f"{row[key]:.4f}" for key in ("slope", "slope_theory", "attention_error", "decoded_first_error")]
            cells += [f"{row['distance_to_decoded_first']:.1e}"]
            if options.interpret:
                cells += [f"{row['program_error']:.4f}", f"{row['program_to_golden']:.1e}"]
            print("| " + " | ".join(cells) + " |")
    return 1 if any(is_off(row) for row in kept) else 0


if __name__ == "__main__":
    sys.exit(main())
