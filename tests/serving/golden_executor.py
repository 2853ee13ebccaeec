"""A tiny real executor on the golden decoder: random W8A8 weights, paged BF16 cache, true attention.

It lets the engine's tests run in seconds without a checkpoint, and it notices misuse: reading a page that the sequence
never wrote gives other logits, because released pages are overwritten by whoever gets them next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.goldens import PAGE_TOKENS, LayerShape, LayerWeights, TokenRows, decoder_layer, lm_head
from quantize.model_config import ModelConfig
from quantize.numerics import rope_tables, to_bf16
from serving.errors import ExecutorError
from serving.executor.base import Chunk

CONFIG = ModelConfig(
    family="llama",
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=320,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_tokens=1024,
    tie_word_embeddings=False,
    qk_norm=False,
    qkv_bias=False,
    dtype="bfloat16",
    eos_token_ids=(),
    bos_token_id=0,
)


class GoldenExecutor:
    """Executes batches row by row with the golden layer; `eos_token_ids` and `before_forward` are for the tests."""

    def __init__(
        self,
        num_pages: int = 16,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        before_forward: Callable[[Sequence[Chunk]], None] | None = None,
    ) -> None:
        self.config = ModelConfig(**{**CONFIG.__dict__, "eos_token_ids": eos_token_ids})
        self.num_pages = num_pages
        self.max_context_tokens = CONFIG.max_position_tokens
        self.batches: list[list[Chunk]] = []
        self.closed = threading.Event()
        self._before_forward = before_forward
        generator = torch.Generator().manual_seed(seed)
        self._layers = [random_layer(self.config, generator) for _ in range(self.config.num_layers)]
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        self._embedding = to_bf16(torch.randn(vocab, hidden, generator=generator))
        self._head = to_bf16(torch.randn(vocab, hidden, generator=generator))
        self._cos, self._sin = rope_tables(self.config.head_dim, self.config.rope_theta, self.max_context_tokens)
        shape = (num_pages * PAGE_TOKENS, self.config.kv_size)
        # Stale content must not be mistaken for an empty page, so the cache starts as noise.
        self._caches = [
            (to_bf16(torch.randn(shape, generator=generator)), to_bf16(torch.randn(shape, generator=generator)))
            for _ in self._layers
        ]

    def forward(self, batch: Sequence[Chunk]) -> Tensor:
        """Run `batch` by the golden definition."""
        self.batches.append(list(batch))
        if self._before_forward is not None:
            self._before_forward(batch)
        rows = [self._run(chunk) for chunk in batch]
        return torch.cat(rows) if rows else torch.empty(0, self.config.vocab_size)

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed.set()

    def _run(self, chunk: Chunk) -> Tensor:
        count = len(chunk.token_ids)
        if len(chunk.pages) * PAGE_TOKENS < chunk.start_position + count:
            raise ExecutorError(f"{len(chunk.pages)} pages for {chunk.start_position + count} tokens")
        positions = torch.arange(chunk.start_position, chunk.start_position + count)
        pages = torch.tensor(chunk.pages)
        slots = pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        rows = TokenRows(positions, slots, pages.expand(count, -1), cos=self._cos[positions], sin=self._sin[positions])
        x = self._embedding[torch.tensor(chunk.token_ids)]
        shape = LayerShape(
            self.config.num_heads, self.config.num_kv_heads, self.config.head_dim, self.config.rms_norm_eps
        )
        for weights, (k_cache, v_cache) in zip(self._layers, self._caches, strict=True):
            x = decoder_layer(x, weights, shape, rows, k_cache, v_cache)
        keep = {"last": slice(-1, None), "all": slice(None), "none": slice(0, 0)}[chunk.logits]
        # One row at a time: a matmul's rounding may depend on how many rows it has.
        gamma = torch.ones(self.config.hidden_size)
        logits = [lm_head(row[None], gamma, self._head, self.config.rms_norm_eps) for row in x[keep]]
        return torch.cat(logits) if logits else torch.empty(0, self.config.vocab_size)


def random_layer(config: ModelConfig, generator: torch.Generator) -> LayerWeights:
    """Random INT8 weights whose outputs stay near 1."""

    def codes(rows: int, columns: int) -> Tensor:
        return torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)

    def scales(columns: int, fan_in: int) -> Tensor:
        return torch.full((columns,), fan_in**-0.5 / 73)

    hidden, q, kv, inter = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    return LayerWeights(
        input_rms=torch.ones(hidden),
        wq=codes(hidden, q),
        wk=codes(hidden, kv),
        wv=codes(hidden, kv),
        wq_scale=scales(q, hidden),
        wk_scale=scales(kv, hidden),
        wv_scale=scales(kv, hidden),
        wo=codes(q, hidden),
        wo_scale=scales(hidden, q),
        post_rms=torch.ones(hidden),
        w_gate=codes(hidden, inter),
        w_up=codes(hidden, inter),
        w_gate_scale=scales(inter, hidden),
        w_up_scale=scales(inter, hidden),
        w_down=codes(inter, hidden),
        w_down_scale=scales(hidden, inter),
    )


class ScriptedExecutor:
    """Gives chosen next tokens whatever the prompt: the token after `n` generated ones is `script[n]`, then `filler`.

    For tests about text, where the words matter and the model does not. The prompt must be one token long.
    """

    def __init__(self, script: Sequence[int], num_pages: int = 16, filler: int = 5, vocab_size: int = 320) -> None:
        self.config = ModelConfig(**{**CONFIG.__dict__, "vocab_size": vocab_size})
        self.num_pages = num_pages
        self.max_context_tokens = CONFIG.max_position_tokens
        self._script = list(script)
        self._filler = filler

    def forward(self, batch: Sequence[Chunk]) -> Tensor:
        """One row a chunk, with the scripted token's logit on top."""
        rows = []
        for chunk in batch:
            if chunk.logits == "none":
                continue
            index = chunk.start_position + len(chunk.token_ids) - 1
            row = torch.zeros(self.config.vocab_size)
            row[self._script[index] if index < len(self._script) else self._filler] = 30.0
            rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, self.config.vocab_size)

    def close(self) -> None:
        """Nothing to release."""
