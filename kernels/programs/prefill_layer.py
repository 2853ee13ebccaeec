"""`prefill_layer`: one whole decoder layer, W8A8 or BF16, over packed chunks of prompts, as a program with its golden.

Several sequences stand behind one another, token-major; each brings any number of new tokens, after any number that are
in the cache already (chunked prefill). In: the tokens' BF16 hidden states, the layer's slabs and RoPE rows; per
sequence the row it starts at, its context length after the chunk, and its pages. Out: the layer's hidden states, and
the two caches with the tokens' keys and values written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS, LayerShape, TokenRows, decoder_layer
from kernels.programs.base import Argument, Program, ProgramSpec
from kernels.programs.layer_slabs import WeightForm, golden_weights, sample_slabs, shape_problems, slab_arguments
from kernels.tile_plan import check_layer_tiles
from quantize.model_config import ModelConfig
from quantize.numerics import rope_tables
from quantize.rope import RopeScaling

__all__ = ["MASKED", "PrefillLayer", "PrefillLayerSpec", "causal_bias", "chunk_arguments"]

MASKED = -1e30
"""Added to the score of a later token: its probability is exactly 0, and no infinity is computed with."""


@dataclass(frozen=True)
class PrefillLayerSpec(ProgramSpec):
    """Shape of one prefill layer; the kernel depends on neither `pages` nor `chunks`.

    Rows are projected `window_rows` at a time. `chunks` gives, for every sequence of the sample inputs, the tokens in
    the cache before this call and the tokens that the call brings; `pages` is the size of their cache.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    qk_norm: bool
    qkv_bias: bool
    down: WeightForm
    window_rows: int
    pages: int
    chunks: tuple[tuple[int, int], ...]
    rope_scaling: RopeScaling | None = None
    weights: WeightForm = "int8"

    def __post_init__(self) -> None:
        problems = shape_problems(self)
        if self.window_rows not in range(16, PAGE_TOKENS + 1, 16):
            problems.append(f"window_rows {self.window_rows} is not 16, 32, 48, ... {PAGE_TOKENS}")
        if not self.chunks or any(before < 0 or new < 1 for before, new in self.chunks):
            problems.append(f"chunks {self.chunks} must be pairs (tokens before >= 0, new tokens >= 1), at least one")
        elif sum(_pages(before + new) for before, new in self.chunks) > self.pages:
            problems.append(f"{self.pages} pages cannot hold chunks {self.chunks}")
        if problems:
            raise ProgramError(f"no prefill_layer program for this shape: {'; '.join(problems)}")

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        down: WeightForm,
        chunks: tuple[tuple[int, int], ...],
        window_rows: int = PAGE_TOKENS,
        weights: WeightForm = "int8",
    ) -> PrefillLayerSpec:
        """The layer of `config` over `chunks`, with one page more than they need."""
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            down=down,
            window_rows=window_rows,
            pages=1 + sum(_pages(before + new) for before, new in chunks),
            chunks=chunks,
            weights=weights,
        )

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tokens(self) -> int:
        """Token rows of the sample inputs."""
        return sum(new for _, new in self.chunks)

    @property
    def layer_shape(self) -> LayerShape:
        """The shape as the golden takes it."""
        return LayerShape(self.num_heads, self.num_kv_heads, self.head_dim, self.rms_norm_eps)


class PrefillLayer(Program):
    """The prefill layer of one model; any number of sequences and tokens."""

    name = "prefill_layer"
    kernel_module = "kernels.programs.prefill_layer_kernel"
    spec: PrefillLayerSpec

    def arguments(self) -> tuple[Argument, ...]:
        """Hidden rows, slabs of the layer, token and sequence data, caches, scratch and output."""
        s = self.spec
        fp32, bf16, int32 = torch.float32, torch.bfloat16, torch.int32
        return (
            Argument("x", bf16, (None, s.hidden_size)),
            *slab_arguments(s),
            Argument("cos", fp32, (None, s.head_dim)),
            Argument("sin", fp32, (None, s.head_dim)),
            Argument("row_starts", int32, (None,)),
            Argument("context_tokens", int32, (None,)),
            Argument("block_table", int32, (None, None)),
            Argument("causal_bias", fp32, (PAGE_TOKENS, PAGE_TOKENS)),
            Argument("k_cache", bf16, (None, s.kv_size), "inout"),
            Argument("v_cache", bf16, (None, s.kv_size), "inout"),
            Argument("q_rows", bf16, (None, s.q_size), "scratch"),
            Argument("k_rows", bf16, (None, s.kv_size), "scratch"),
            Argument("v_rows", bf16, (None, s.kv_size), "scratch"),
            Argument("context_rows", bf16, (None, s.q_size), "scratch"),
            Argument("out", bf16, (None, s.hidden_size), "out"),
        )

    def check_tiles(self) -> None:
        """The tiles around every matmul, with a whole window of rows."""
        check_layer_tiles(self.spec, self.spec.window_rows)

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random slabs, hidden rows and cache contents; pages in shuffled order, so that a wrong page shows."""
        s = self.spec
        generator = torch.Generator().manual_seed(seed)
        tensors = self.shape_inputs()
        tensors.update(sample_slabs(s, generator))
        for name in ("x", "k_cache", "v_cache"):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator).to(torch.bfloat16)
        return {**tensors, **self._sample_rows(torch.randperm(s.pages, generator=generator).tolist())}

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros, but for the sequences' lengths and pages."""
        s = self.spec
        rows = dict.fromkeys(("k_cache", "v_cache"), s.pages * PAGE_TOKENS)
        rows |= dict.fromkeys(("q_rows", "k_rows", "v_rows"), self.padded_rows(s.tokens))
        given = self._sample_rows(list(range(s.pages)))
        zeros = {
            a.name: torch.zeros([rows.get(a.name, s.tokens) if n is None else n for n in a.shape], dtype=a.dtype)
            for a in self.arguments()
            if a.name not in given
        }
        return {**zeros, **given}

    def padded_rows(self, tokens: int) -> int:
        """Rows of the scratch for `tokens` token rows: whole windows."""
        return -(-tokens // self.spec.window_rows) * self.spec.window_rows

    def dynamic_rows(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Whole windows for the scratch of projected rows, the tokens' rows for the rest."""
        tokens = tensors["x"].shape[0]
        return self.padded_rows(tokens) if name in ("q_rows", "k_rows", "v_rows") else tokens

    def units(self) -> int:
        """Two bodies per window, one per block of rows, one per page that a block sees, for each head."""
        s = self.spec
        seen = [page + 1 for before, new in s.chunks for page in range(before // PAGE_TOKENS, _pages(before + new))]
        return 2 * self.padded_rows(s.tokens) // s.window_rows + len(seen) + sum(seen) * s.num_heads

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The golden layer on copies of the caches: the same function of the same tokens as in decode."""
        s = self.spec
        weights, rows = golden_weights(s, tensors), self.golden_rows(tensors)
        k_cache, v_cache = tensors["k_cache"].clone(), tensors["v_cache"].clone()
        out = decoder_layer(tensors["x"], weights, s.layer_shape, rows, k_cache, v_cache)
        return {"k_cache": k_cache, "v_cache": v_cache, "out": out}

    def tolerances(self) -> dict[str, str]:
        """The attention's FP32 sums may run in another order; so may those of BF16 weights, INT8 ones are exact."""
        summed = ("out",) if self.spec.weights == "int8" else ("out", "k_cache", "v_cache")
        return dict.fromkeys(summed, "1 BF16 ulp")

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """The slabs once a window, the hidden rows in and out, keys and values written once and read once a block."""
        s = self.spec
        slabs = sum(tensors[a.name].numel() * tensors[a.name].element_size() for a in slab_arguments(s))
        read = sum(
            min(page * PAGE_TOKENS, before + new)
            for before, new in s.chunks
            for page in range(before // PAGE_TOKENS + 1, _pages(before + new) + 1)
        )
        windows = self.padded_rows(s.tokens) // s.window_rows
        rows = s.tokens * (2 * s.hidden_size * 2 + 2 * s.head_dim * 4)
        return windows * slabs + rows + 2 * 2 * s.kv_size * (read + s.tokens)

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse rows, pages and lengths that do not fit one another or the cache."""
        problems = self._row_problems(tensors)
        if not problems:
            problems = self._sequence_problems(tensors)
        if not torch.equal(tensors["causal_bias"], causal_bias()):
            problems.append("causal_bias is not what `causal_bias` gives")
        if problems:
            raise ProgramError(f"{self.name} cannot be called: " + "; ".join(problems))

    def _row_problems(self, tensors: Mapping[str, Tensor]) -> list[str]:
        tokens, sequences = tensors["x"].shape[0], tensors["context_tokens"].shape[0]
        expected = dict.fromkeys(("cos", "sin", "context_rows", "out"), tokens)
        expected |= dict.fromkeys(("q_rows", "k_rows", "v_rows"), self.padded_rows(tokens))
        expected |= {"row_starts": sequences + 1, "block_table": sequences}
        expected["v_cache"] = tensors["k_cache"].shape[0]
        problems = [
            f"`{name}` has {tensors[name].shape[0]} rows, expected {rows}"
            for name, rows in expected.items()
            if tensors[name].shape[0] != rows
        ]
        if tensors["k_cache"].shape[0] % PAGE_TOKENS:
            problems.append(f"caches must be whole pages of {PAGE_TOKENS} slots, have {tensors['k_cache'].shape[0]}")
        return problems

    def _sequence_problems(self, tensors: Mapping[str, Tensor]) -> list[str]:
        pages = tensors["k_cache"].shape[0] // PAGE_TOKENS
        starts, table, tokens = tensors["row_starts"].tolist(), tensors["block_table"], tensors["x"].shape[0]
        problems = []
        written: list[int] = []
        if starts[0] != 0 or starts[-1] != tokens or any(b <= a for a, b in pairwise(starts)):
            return [f"row_starts {starts} must rise from 0 to {tokens}, at least one row a sequence"]
        for sequence, context in enumerate(tensors["context_tokens"].tolist()):
            first, last = starts[sequence], starts[sequence + 1]
            if not last - first <= context <= table.shape[1] * PAGE_TOKENS:
                problems.append(
                    f"sequence {sequence}: context of {context} tokens is not in {last - first}.."
                    f"{table.shape[1] * PAGE_TOKENS}"
                )
                continue
            owned = table[sequence, : _pages(context)].tolist()
            if any(not 0 <= page < pages for page in owned):
                problems.append(f"sequence {sequence}: pages {owned} are not all in the cache of {pages}")
            else:
                written += _slots(owned, range(context - (last - first), context))
        if len(set(written)) != len(written):
            problems.append("two tokens would be written to one slot: sequences share a page, or one has a page twice")
        return problems

    def _sample_rows(self, order: list[int]) -> dict[str, Tensor]:
        s = self.spec
        pages: list[list[int]] = []
        for before, new in s.chunks:
            pages.append(order[: _pages(before + new)])
            order = order[_pages(before + new) :]
        longest = max(before + new for before, new in s.chunks)
        cos, sin = rope_tables(s.head_dim, s.rope_theta, longest, s.rope_scaling)
        return {**chunk_arguments(s.chunks, pages, cos, sin), "causal_bias": causal_bias()}

    def golden_rows(self, tensors: Mapping[str, Tensor]) -> TokenRows:
        """Where the tokens stand, as the golden takes it."""
        counts = tensors["row_starts"].diff()
        ends = tensors["context_tokens"].tolist()
        positions = [torch.arange(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
        slots = [
            slot
            for owned, at in zip(tensors["block_table"].tolist(), positions, strict=True)
            for slot in _slots(owned, at.tolist())
        ]
        return TokenRows(
            positions=torch.cat(positions),
            slots=torch.tensor(slots),
            block_table=tensors["block_table"].to(torch.int64).repeat_interleave(counts, dim=0),
            cos=tensors["cos"],
            sin=tensors["sin"],
        )


def causal_bias() -> Tensor:
    """FP32 `[128, 128]`: 0 where the query (row of a page) sees the key (column), `MASKED` where not."""
    at = torch.arange(PAGE_TOKENS)
    return torch.where(at <= at[:, None], 0.0, MASKED)


def chunk_arguments(
    chunks: Sequence[tuple[int, int]], pages: Sequence[list[int]], cos: Tensor, sin: Tensor
) -> dict[str, Tensor]:
    """The per-token and per-sequence arguments of `chunks` in sequences that own `pages`; RoPE tables `[*, dim]`."""
    table = torch.zeros(len(pages), max(len(owned) for owned in pages), dtype=torch.int32)
    for sequence, owned in enumerate(pages):
        table[sequence, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
    positions = [at for before, new in chunks for at in range(before, before + new)]
    return {
        "cos": cos[positions].contiguous(),
        "sin": sin[positions].contiguous(),
        "row_starts": torch.tensor([0, *(new for _, new in chunks)]).cumsum(0).to(torch.int32),
        "context_tokens": torch.tensor([before + new for before, new in chunks], dtype=torch.int32),
        "block_table": table,
    }


def _slots(pages: Sequence[int], positions: Sequence[int]) -> list[int]:
    return [pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS for at in positions]


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
