"""`decode_layer`: one whole decoder layer, W8A8 or BF16, over a batch of single tokens, as a program with its golden.

In: the BF16 hidden states of any number of rows, the layer's slabs, RoPE rows, cache slots, block table and context
lengths. Out: the layer's hidden states, and the two caches with the rows' keys and values written. Rows are worked in
windows of 16, one after the other: a row may attend to what the rows before it and the rest of its window write. So
rows of one sequence may stand in one batch, in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import BATCH_WINDOW_ROWS as WINDOW_ROWS
from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS, LayerShape, LayerWeights, TokenRows
from kernels.kv_format import KV_FORMATS, KvFormat, parse_kv_format
from kernels.programs.base import Argument, Program, ProgramSpec, check_rows
from kernels.programs.decode_cache import (
    BF16_CACHES,
    cache_arguments,
    cache_names,
    golden_layer,
    key_width,
    sample_cache,
)
from kernels.programs.decode_tiles import page_groups
from kernels.programs.layer_slabs import (
    PLACEHOLDER_COLUMNS,
    WeightForm,
    golden_weights,
    sample_slabs,
    shape_problems,
    slab_arguments,
)
from kernels.programs.turboquant_encode import format_problems
from kernels.tile_plan import check_layer_tiles
from quantize.model_config import ModelConfig
from quantize.numerics import rope_tables
from quantize.rope import RopeScaling

__all__ = [
    "DecodeLayer",
    "DecodeLayerSpec",
    "TurboQuantDecodeLayer",
    "decode_layer",
    "layer_arguments",
    "row_arguments",
]

_ROWS = ("cos", "sin", "slots", "context_tokens", "block_table")


@dataclass(frozen=True)
class DecodeLayerSpec(ProgramSpec):
    """Shape of one decode layer; the kernel depends on neither `batch_rows` nor `pages` nor `contexts`.

    `contexts` are the context lengths of `batch_rows` rows in tokens, the new token included; `pages` the pages of the
    cache. They shape the sample inputs, where every row has pages of its own. BF16 `weights` stand for BF16 activations
    too, and need a BF16 `down`. `kv` names how keys and values are kept (`kernels.kv_format.KV_FORMATS`).
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
    batch_rows: int
    pages: int
    contexts: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    weights: WeightForm = "int8"
    kv: str = "bf16"

    def __post_init__(self) -> None:
        problems = shape_problems(self)
        if self.kv not in KV_FORMATS:
            problems.append(f"kv {self.kv!r} is not one of {', '.join(KV_FORMATS)}")
        elif self.kv_format is not None:
            problems += format_problems(self.num_kv_heads, self.head_dim, self.kv_format.bits)
            problems += [] if self.weights == "int8" else [f"kv {self.kv} beside BF16 weights; expected bf16"]
        if len(self.contexts) != self.batch_rows or min(self.contexts, default=0) < 1:
            problems.append(f"contexts {self.contexts} must give one length >= 1 for each of {self.batch_rows} rows")
        elif -(-max(self.contexts) // PAGE_TOKENS) > self.pages:
            problems.append(f"{self.pages} pages cannot hold contexts {self.contexts}")
        if problems:
            raise ProgramError(f"no decode_layer program for this shape: {'; '.join(problems)}")

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        down: WeightForm,
        contexts: tuple[int, ...],
        pages: int | None = None,
        weights: WeightForm = "int8",
        kv: str = "bf16",
    ) -> DecodeLayerSpec:
        """The layer of `config` over one row per context length; `pages` of cache, by default one more than needed."""
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
            batch_rows=len(contexts),
            pages=1 + sum(-(-tokens // PAGE_TOKENS) for tokens in contexts) if pages is None else pages,
            contexts=contexts,
            weights=weights,
            kv=kv,
        )

    @property
    def kv_format(self) -> KvFormat | None:
        """How TurboQuant keeps keys and values; None for BF16."""
        return parse_kv_format(self.kv)

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_shape(self) -> LayerShape:
        """The shape as the golden takes it."""
        return LayerShape(self.num_heads, self.num_kv_heads, self.head_dim, self.rms_norm_eps)


class DecodeLayer(Program):
    """The decode layer at one shape."""

    name = "decode_layer"
    kernel_module = "kernels.programs.decode_layer_kernel"
    spec: DecodeLayerSpec

    def arguments(self) -> tuple[Argument, ...]:
        """Hidden rows, slabs of the layer, row data, caches, scratch and output."""
        s = self.spec
        fp32, bf16, int32 = torch.float32, torch.bfloat16, torch.int32
        hidden, window_heads = s.hidden_size, WINDOW_ROWS * s.num_heads
        return (
            Argument("x", bf16, (None, hidden)),
            *slab_arguments(s),
            Argument("cos", fp32, (None, s.head_dim)),
            Argument("sin", fp32, (None, s.head_dim)),
            Argument("slots", int32, (None, 1)),
            Argument("context_tokens", int32, (None,)),
            Argument("block_table", int32, (None, None)),
            *cache_arguments(s),
            Argument("q_rows", bf16, (window_heads, s.num_kv_heads * key_width(s)), "scratch"),
            Argument("context_rows", bf16, (window_heads, s.head_dim), "scratch"),
            Argument("out", bf16, (None, hidden), "out"),
        )

    def check_tiles(self) -> None:
        """The tiles around every matmul, over a window of rows."""
        check_layer_tiles(self.spec, WINDOW_ROWS)

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random slabs, hidden rows and cache contents; pages in shuffled order, so that a wrong page shows."""
        s = self.spec
        generator = torch.Generator().manual_seed(seed)
        tensors = self.shape_inputs()
        tensors.update(sample_slabs(s, generator))
        tensors["x"] = torch.randn(tensors["x"].shape, generator=generator).to(torch.bfloat16)
        tensors.update(sample_cache(s, s.pages * PAGE_TOKENS, generator))
        tensors.update(self._sample_rows(torch.randperm(s.pages, generator=generator).tolist()))
        return tensors

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros, but for the rows' lengths, slots and pages."""
        s = self.spec
        rows = {"x": s.batch_rows, "out": s.batch_rows}
        tensors = {
            a.name: torch.zeros(
                [rows.get(a.name, s.pages * PAGE_TOKENS) if size is None else size for size in a.shape], dtype=a.dtype
            )
            for a in self.arguments()
        }
        tensors.update(self._sample_rows(list(range(s.pages))))
        return tensors

    def units(self) -> int:
        """For every window prologue, output projection, gate and up, down; for every row one body a group of pages."""
        windows = -(-self.spec.batch_rows // WINDOW_ROWS)
        return 4 * windows + sum(page_groups(tokens) for tokens in self.spec.contexts)

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The golden layer on copies of the caches, and the query rows that the prologue hands to attention."""
        s = self.spec
        weights, rows = self.golden_weights(tensors), self._golden_rows(tensors)
        layer = golden_layer(s, tensors["x"], weights, s.layer_shape, rows, tensors)
        # Every window takes the scratch of the one before.
        spread = tensors["q_rows"].clone()
        spread_rows = spread_queries(layer.query, s.num_kv_heads)
        for first in range(0, spread_rows.shape[0], spread.shape[0]):
            of_window = spread_rows[first : first + spread.shape[0]]
            spread[: of_window.shape[0]] = of_window
        return {**layer.caches, "q_rows": spread, "out": layer.out}

    def tolerances(self) -> dict[str, str]:
        """The attention's FP32 sums may run in another order; so may those of BF16 weights, INT8 ones are exact."""
        summed = ("out",) if self.spec.weights == "int8" else ("out", *BF16_CACHES, "q_rows")
        return dict.fromkeys(summed, "1 BF16 ulp")

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Every slab once, the hidden rows in and out, and each row's keys and values (read, and one row written)."""
        caches = cache_names(self.spec.kv_format)
        skipped = {*caches, "q_rows", "context_rows"}
        fixed = sum(t.numel() * t.element_size() for name, t in tensors.items() if name not in skipped)
        cached_tokens = int(tensors["context_tokens"].sum()) + tensors["x"].shape[0]
        return fixed + cached_tokens * sum(tensors[name][0].nbytes for name in caches)

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse slots, pages and lengths outside the cache, which the kernel would skip or read as zeros.

        So is a row that attends to what a row of a later window writes.
        """
        check_rows(self.name, tensors, ("x", *_ROWS, "out"))
        self.check_row_values(tensors)

    def check_row_values(self, tensors: Mapping[str, Tensor]) -> None:
        """As `check_values`, of row data whose number of rows has been checked."""
        cache_slots, *others = (tensors[name].shape[0] for name in cache_names(self.spec.kv_format))
        slots, table = tensors["slots"].flatten().tolist(), tensors["block_table"]
        lengths = tensors["context_tokens"].tolist()
        problems = []
        if cache_slots % PAGE_TOKENS or any(other != cache_slots for other in others):
            problems.append(
                f"caches must be equal in length and whole pages of {PAGE_TOKENS} slots, have {cache_slots}"
            )
        if any(not 0 <= slot < cache_slots for slot in slots) or len(set(slots)) != len(slots):
            problems.append(f"slots {slots} must be distinct and in 0..{cache_slots - 1}")
        for row, length in enumerate(lengths):
            pages = table[row, : max(0, -(-length // PAGE_TOKENS))].tolist()
            if not 1 <= length <= table.shape[1] * PAGE_TOKENS:
                problems.append(f"row {row}: context of {length} tokens is not in 1..{table.shape[1] * PAGE_TOKENS}")
            elif any(not 0 <= page < cache_slots // PAGE_TOKENS for page in pages):
                problems.append(f"row {row}: pages {pages} are not all in the cache of {cache_slots // PAGE_TOKENS}")
            elif slots[row] != pages[-1] * PAGE_TOKENS + (length - 1) % PAGE_TOKENS:
                problems.append(f"row {row}: slot {slots[row]} is not where token {length - 1} of pages {pages} stands")
        problems = problems or _read_before_written(slots, lengths, table)
        if problems:
            raise ProgramError(f"{self.name} cannot be called: " + "; ".join(problems))

    def _sample_rows(self, order: list[int]) -> dict[str, Tensor]:
        """Row arguments that deal out the pages of `order`, with the last token of every context as the new one."""
        s = self.spec
        pages: list[list[int]] = []
        for tokens in s.contexts:
            count = -(-tokens // PAGE_TOKENS)
            if count > len(order):
                raise ProgramError(f"{s.pages} pages are too few for a sample whose rows have pages of their own")
            pages.append(order[:count])
            order = order[count:]
        cos, sin = rope_tables(s.head_dim, s.rope_theta, max(s.contexts), s.rope_scaling)
        return row_arguments([tokens - 1 for tokens in s.contexts], pages, cos, sin)

    def golden_weights(self, tensors: Mapping[str, Tensor]) -> LayerWeights:
        """The slabs among `tensors` as the golden takes them."""
        return golden_weights(self.spec, tensors)

    def _golden_rows(self, tensors: Mapping[str, Tensor]) -> TokenRows:
        return TokenRows(
            positions=tensors["context_tokens"].to(torch.int64) - 1,
            slots=tensors["slots"].flatten().to(torch.int64),
            block_table=tensors["block_table"].to(torch.int64),
            cos=tensors["cos"],
            sin=tensors["sin"],
        )


class TurboQuantDecodeLayer(DecodeLayer):
    """The decode layer over a TurboQuant cache."""

    name = "decode_layer_turboquant"
    kernel_module = "kernels.programs.decode_layer_kernel"

    def tolerances(self) -> dict[str, str]:
        """Codes are exact; turned queries and norms are FP32 sums, whose order is not fixed."""
        norms = dict.fromkeys(("k_norms", "v_norms"), "FP32 summation order")
        return {**norms, **dict.fromkeys(("q_rows", "out"), "1 BF16 ulp")}


def decode_layer(spec: DecodeLayerSpec) -> DecodeLayer:
    """The program of `spec`, by how it keeps keys and values."""
    return DecodeLayer(spec) if spec.kv_format is None else TurboQuantDecodeLayer(spec)


def _read_before_written(slots: list[int], lengths: list[int], table: Tensor) -> list[str]:
    """Rows that attend to a key which a row of a later window writes, as messages."""
    problems = []
    for row, length in enumerate(lengths):
        first_later = (row // WINDOW_ROWS + 1) * WINDOW_ROWS
        pages = table[row, : -(-length // PAGE_TOKENS)].tolist()
        for later in range(first_later, len(slots)):
            page, offset = divmod(slots[later], PAGE_TOKENS)
            if page in pages and pages.index(page) * PAGE_TOKENS + offset < length:
                problems.append(
                    f"row {row} attends to slot {slots[later]}, which row {later} of a later window of {WINDOW_ROWS} "
                    "rows writes; put the rows of a sequence in the order of their positions"
                )
    return problems


def spread_queries(query: Tensor, kv_heads: int) -> Tensor:
    """Queries `[rows, heads, dim]` as attention takes them: `[rows * heads, kv_heads * dim]`.

    A head's values stand at the columns of its keys; elsewhere the row is zero.
    """
    rows, heads, dim = query.shape
    own = torch.eye(kv_heads, dtype=query.dtype).repeat_interleave(heads // kv_heads, dim=0)
    return (query.unsqueeze(2) * own.unsqueeze(-1)).reshape(rows * heads, kv_heads * dim)


def row_arguments(positions: list[int], pages: list[list[int]], cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
    """The per-row arguments for tokens at `positions` in sequences that own `pages`, from RoPE tables `[*, dim]`."""
    width = max(len(row) for row in pages)
    table = torch.zeros(len(pages), width, dtype=torch.int32)
    for row, owned in enumerate(pages):
        table[row, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
    slots = [
        owned[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS for at, owned in zip(positions, pages, strict=True)
    ]
    return {
        "cos": cos[positions].contiguous(),
        "sin": sin[positions].contiguous(),
        "slots": torch.tensor(slots, dtype=torch.int32).unsqueeze(1),
        "context_tokens": torch.tensor(positions, dtype=torch.int32) + 1,
        "block_table": table,
    }


def layer_arguments(weights: LayerWeights) -> dict[str, Tensor]:
    """One layer's slabs as program arguments: vectors become rows of one, absent slabs placeholder rows."""
    arguments = {}
    for name in LayerWeights.__dataclass_fields__:
        tensor: Tensor | None = getattr(weights, name)
        if tensor is None:
            tensor = torch.zeros(1, PLACEHOLDER_COLUMNS)
        arguments[name] = tensor.unsqueeze(0) if tensor.dim() == 1 else tensor
    return arguments
