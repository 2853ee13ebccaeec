"""Small program cases, and the means to sabotage the subprocess that runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.catalog import Check
from kernels.programs.base import Program
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec
from kernels.programs.layer_slabs import WeightForm
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.verdict import ALL_PASSES


def layer_program(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    *,
    qk_norm: bool = True,
    qkv_bias: bool = False,
    down: str = "int8",
    weights: WeightForm = "int8",
    contexts: tuple[int, ...] = (2, 130),
) -> DecodeLayer:
    """A decode layer of hidden size 64; the contexts end in different pages."""
    spec = DecodeLayerSpec(
        hidden_size=64,
        intermediate_size=96,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        down="bf16" if down == "bf16" else "int8",
        batch_rows=len(contexts),
        pages=1 + sum(-(-tokens // 128) for tokens in contexts),
        contexts=contexts,
        weights=weights,
    )
    return DecodeLayer(spec)


def head_program(real_vocab: int = 300, chunk_tokens: int = 128, batch_rows: int = 3) -> LmHeadGreedy:
    """An LM head of hidden size 64 in three chunks, the last overlapping the one before."""
    padded = -(-real_vocab // 512) * 512
    return LmHeadGreedy(LmHeadSpec(64, real_vocab, padded, 1e-6, batch_rows, chunk_tokens))


def full_check(program: Program) -> Check:
    """Verification through all passes."""
    return Check("small", program, ALL_PASSES)


def sabotage(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Run `code` at the start of every Python subprocess of this test."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))
