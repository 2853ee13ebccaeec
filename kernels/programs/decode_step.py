"""`decode_step`: whole decode steps of a model as one program, from embedding rows to the next ones, with its golden.

In: the stacked slabs of all layers, the embedding and LM head, the hidden rows that the steps start from, and the
positions of every step's tokens. Out: logits and greedy ids of every step, the caches with the tokens' keys and values,
and the embedding rows of the last ids. Neither the number of layers nor that of steps is compiled in, and nothing goes
through the host between steps: the ids of one are the tokens of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.contract import BATCH_WINDOW_ROWS as WINDOW_ROWS
from kernels.errors import ProgramError
from kernels.goldens import PAGE_TOKENS, TokenRows, decoder_layers, next_tokens
from kernels.programs.base import Argument, Program, ProgramSpec
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec, row_arguments
from kernels.programs.decode_tiles import page_groups
from kernels.programs.layer_slabs import (
    STACKED_SLABS,
    WeightForm,
    slab_arguments,
    slabs_of_layer,
    stacked_arguments,
    stacked_rows,
)
from kernels.programs.lm_head import CHUNK_TOKENS, LmHeadGreedy, LmHeadSpec
from quantize.model_config import ModelConfig
from quantize.numerics import rope_tables

__all__ = ["DecodeStep", "DecodeStepSpec", "step_rows"]

_CACHES = ("k_cache", "v_cache")


@dataclass(frozen=True)
class DecodeStepSpec(ProgramSpec):
    """Shape of the steps; the kernel depends on neither `layers` nor `steps` nor the number of rows.

    `layer.contexts` are the context lengths of `layer.batch_rows` rows in the first step; they grow by one a step.
    They, `layers` and `steps` shape the sample inputs.
    """

    layer: DecodeLayerSpec
    head: LmHeadSpec
    layers: int
    steps: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"the layer's {name} is {of_layer}, the LM head's {of_head}"
            for name, of_layer, of_head in (
                ("hidden_size", self.layer.hidden_size, self.head.hidden_size),
                ("batch_rows", self.layer.batch_rows, self.head.batch_rows),
                ("rms_norm_eps", self.layer.rms_norm_eps, self.head.rms_norm_eps),
            )
            if of_layer != of_head
        ]
        if self.layers < 1 or self.steps < 1:
            problems.append(f"{self.layers} layers and {self.steps} steps; expected at least 1 of each")
        if self.layer.kv != "bf16":
            problems.append(f"kv is {self.layer.kv}; steps keep bf16, and layers one by one keep the others")
        longest = max(self.contexts_at(self.steps - 1))
        if longest > self.layer.pages * PAGE_TOKENS:
            problems.append(f"{self.layer.pages} pages cannot hold a context that grows to {longest} tokens")
        if problems:
            raise ProgramError(f"no decode_step program for this shape: {'; '.join(problems)}")

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        down: WeightForm,
        contexts: tuple[int, ...],
        *,
        layers: int | None = None,
        steps: int = 1,
        pages: int | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        weights: WeightForm = "int8",
    ) -> DecodeStepSpec:
        """The steps of `config` over one row per context length, by default through all its layers."""
        if pages is None:
            pages = 1 + sum(-(-(tokens + steps - 1) // PAGE_TOKENS) for tokens in contexts)
        return cls(
            layer=DecodeLayerSpec.of(config, down, contexts, pages, weights),
            head=LmHeadSpec.of(config, len(contexts), chunk_tokens),
            layers=config.num_layers if layers is None else layers,
            steps=steps,
        )

    def contexts_at(self, step: int) -> tuple[int, ...]:
        """The rows' context lengths in `step`."""
        return tuple(tokens + step for tokens in self.layer.contexts)


class DecodeStep(Program):
    """The decode steps at one shape."""

    name = "decode_step"
    kernel_module = "kernels.programs.decode_step_kernel"
    spec: DecodeStepSpec

    def __init__(self, spec: DecodeStepSpec) -> None:
        super().__init__(spec)
        self._layer = DecodeLayer(spec.layer)
        self._head = LmHeadGreedy(spec.head)

    def arguments(self) -> tuple[Argument, ...]:
        """Hidden rows, stacked slabs, head and embedding, row data, caches, scratch, outputs."""
        layer = {argument.name: argument for argument in self._layer.arguments()}
        head = {argument.name: argument for argument in self._head.arguments()}
        dim, int32 = self.spec.layer.head_dim, torch.int32
        return (
            replace(layer["x"], direction="inout"),
            *stacked_arguments(self.spec.layer),
            head["final_norm"],
            replace(head["weight"], name="lm_head_weight"),
            Argument("embed_weight", torch.bfloat16, head["weight"].shape),
            Argument("cos", torch.float32, (None, dim)),
            Argument("sin", torch.float32, (None, dim)),
            Argument("slots", int32, (None, 1)),
            Argument("context_tokens", int32, (None,)),
            layer["block_table"],
            *(layer[name] for name in _CACHES),
            layer["q_rows"],
            layer["context_rows"],
            *(head[name] for name in ("normed_rows", "block_maxima", "block_ids")),
            Argument("logits", torch.float32, (None, self.spec.head.real_vocab), "out"),
            Argument("ids", int32, (None, 1), "out"),
        )

    def check_tiles(self) -> None:
        """Those of the layer and of the LM head."""
        self._layer.check_tiles()
        self._head.check_tiles()

    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random slabs of every layer, a random embedding and head, caches and pages as in `decode_layer`."""
        s = self.spec
        each = [self._layer.sample_inputs(seed + index) for index in range(s.layers)]
        head = self._head.sample_inputs(seed)
        tensors = self._empty(s.layer.pages * PAGE_TOKENS * s.layers)
        tensors |= {name: torch.cat([one[name] for one in each]) for name in (*STACKED_SLABS, *_CACHES)}
        tensors |= {"x": each[0]["x"], "final_norm": head["final_norm"], "lm_head_weight": head["weight"]}
        # A seed that no layer has: its first values would be those of `x`.
        generator = torch.Generator().manual_seed(seed + 1000)
        tensors["embed_weight"] = torch.randn(tensors["embed_weight"].shape, generator=generator).to(torch.bfloat16)
        return tensors | self._sample_rows(torch.randperm(s.layer.pages, generator=generator).tolist())

    def shape_inputs(self) -> dict[str, Tensor]:
        """Zeros, but for the rows' lengths, slots and pages."""
        s = self.spec
        return self._empty(s.layer.pages * PAGE_TOKENS * s.layers) | self._sample_rows(list(range(s.layer.pages)))

    def units(self) -> int:
        """For each step the layers' bodies, and the LM head's."""
        s = self.spec
        groups = [page_groups(tokens) for step in range(s.steps) for tokens in s.contexts_at(step)]
        windows = -(-s.layer.batch_rows // WINDOW_ROWS)
        return s.steps * (4 * s.layers * windows + self._head.units()) + s.layers * sum(groups)

    def dynamic_rows(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Logits and ids are those of every step."""
        return tensors["context_tokens" if name in ("logits", "ids") else "x"].shape[0]

    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The golden steps on copies of the caches and hidden rows."""
        s = self.spec
        layers = tensors["input_rms"].shape[0]
        caches = {name: tensors[name].clone() for name in _CACHES}
        weights = [self._layer.golden_weights(slabs_of_layer(tensors, index, layers)) for index in range(layers)]
        head = (tensors["final_norm"][0], tensors["lm_head_weight"], tensors["embed_weight"], s.head.real_vocab)
        shape, split = s.layer.layer_shape, (layers, -1, s.layer.kv_size)
        x, logits, ids = tensors["x"], [], []
        for step in range(tensors["context_tokens"].shape[0] // x.shape[0]):
            rows = self._golden_rows(tensors, step, layers)
            x = decoder_layers(x, weights, shape, rows, *(caches[name].view(split) for name in _CACHES))
            step_logits, step_ids, x = next_tokens(x, *head, s.head.rms_norm_eps)
            logits.append(step_logits)
            ids.append(step_ids)
        sampled = torch.cat(ids).to(torch.int32).unsqueeze(1)
        return {"x": x, **caches, "logits": torch.cat(logits), "ids": sampled}

    def tolerances(self) -> dict[str, str]:
        """Ids and the next rows are exact; FP32 sums have no fixed order: the logits', and those of BF16 weights."""
        if self.spec.layer.weights == "int8":
            return {"logits": "FP32 summation order"}
        return {"logits": "1 BF16 ulp of an input", **dict.fromkeys(_CACHES, "1 BF16 ulp")}

    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Slabs and LM head once a step, each row's keys and values in every layer, the embedding rows read."""
        s = self.spec
        batch = tensors["x"].shape[0]
        steps = tensors["context_tokens"].shape[0] // batch
        slabs = sum(tensors[name].numel() * tensors[name].element_size() for name in STACKED_SLABS)
        cached_tokens = int(tensors["context_tokens"].sum()) + steps * batch
        rows = 2 * batch * s.layer.hidden_size * 2
        caches = s.layers * 2 * cached_tokens * s.layer.kv_size * 2
        return caches + steps * (slabs + self._head.hbm_bytes(tensors) + rows)

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse stacks of different depth, and slots, pages and lengths outside a layer's cache."""
        batch = tensors["x"].shape[0]
        layers, steps = tensors["input_rms"].shape[0], tensors["context_tokens"].shape[0] // batch
        expected = stacked_rows(self.spec.layer, layers)
        expected |= dict.fromkeys(("context_tokens", "cos", "sin", "logits", "ids"), steps * batch)
        expected |= {"slots": steps * layers * batch, "block_table": batch}
        problems = [
            f"`{name}` has {tensors[name].shape[0]} rows, {layers} layers and {steps} steps of {batch} rows need {rows}"
            for name, rows in expected.items()
            if tensors[name].shape[0] != rows
        ]
        problems += [
            f"`{name}` has {tensors[name].shape[0]} rows, which are no whole pages of {PAGE_TOKENS} for {layers} layers"
            for name in _CACHES
            if tensors[name].shape[0] % (layers * PAGE_TOKENS)
        ]
        if problems:
            raise ProgramError(f"{self.name} cannot be called: " + "; ".join(problems))
        layer_slots = tensors["k_cache"].shape[0] // layers
        slots = tensors["slots"].view(steps, layers, batch)
        if not torch.equal(slots, _layer_slots(slots[:, 0], layers, layer_slots)):
            raise ProgramError(
                f"{self.name} cannot be called: `slots` must hold a step's slots once per layer, each time "
                f"{layer_slots} further: see `step_rows`"
            )
        lengths = tensors["context_tokens"].view(steps, batch)
        if not torch.equal(lengths[1:], lengths[:-1] + 1):
            raise ProgramError(f"{self.name} cannot be called: `context_tokens` must grow by one a step")
        for step, contexts in enumerate(lengths):
            rows = {"slots": slots[step, 0], "context_tokens": contexts, "block_table": tensors["block_table"]}
            caches = {name: tensors[name][: tensors[name].shape[0] // layers] for name in _CACHES}
            self._layer.check_row_values(rows | caches)

    def _empty(self, cache_slots: int) -> dict[str, Tensor]:
        """Zeros of the sample's shapes; row arguments are left to the caller."""
        s = self.spec
        rows = {a.name: s.layers * (a.shape[0] or 1) for a in slab_arguments(s.layer)}
        rows |= dict.fromkeys(_CACHES, cache_slots)
        rows |= dict.fromkeys(("logits", "ids"), s.steps * s.layer.batch_rows) | {"x": s.layer.batch_rows}
        return {
            a.name: torch.zeros([rows.get(a.name, 1) if size is None else size for size in a.shape], dtype=a.dtype)
            for a in self.arguments()
        }

    def _sample_rows(self, order: list[int]) -> dict[str, Tensor]:
        """Row arguments that deal out the pages of `order`."""
        s = self.spec
        pages: list[list[int]] = []
        for tokens in s.contexts_at(s.steps - 1):
            count = -(-tokens // PAGE_TOKENS)
            if count > len(order):
                raise ProgramError(
                    f"{s.layer.pages} pages do not give every row of a sample pages of its own; use more"
                )
            pages.append(order[:count])
            order = order[count:]
        longest = max(s.contexts_at(s.steps - 1))
        cos, sin = rope_tables(s.layer.head_dim, s.layer.rope_theta, longest, s.layer.rope_scaling)
        first = [tokens - 1 for tokens in s.layer.contexts]
        return step_rows(first, pages, cos, sin, s.layers, s.layer.pages * PAGE_TOKENS, s.steps)

    def _golden_rows(self, tensors: Mapping[str, Tensor], step: int, layers: int) -> TokenRows:
        batch = tensors["x"].shape[0]
        at = slice(step * batch, (step + 1) * batch)
        slots = tensors["slots"].view(-1, layers, batch)[step, 0]
        return TokenRows(
            positions=tensors["context_tokens"][at].to(torch.int64) - 1,
            slots=slots.to(torch.int64),
            block_table=tensors["block_table"].to(torch.int64),
            cos=tensors["cos"][at],
            sin=tensors["sin"][at],
        )


def step_rows(
    positions: list[int],
    pages: list[list[int]],
    cos: Tensor,
    sin: Tensor,
    layers: int,
    layer_slots: int,
    steps: int = 1,
) -> dict[str, Tensor]:
    """The per-row arguments of `steps` decode steps whose first tokens stand at `positions`.

    `pages` are each row's pages in order, enough for its last step; `cos` and `sin` the RoPE tables `[*, dim]`;
    `layer_slots` the cache rows of one of the `layers` layers. Position, slot and length of every step are known
    beforehand: only the ids are not.
    """
    each = [row_arguments([at + step for at in positions], pages, cos, sin) for step in range(steps)]
    joined = {name: torch.cat([rows[name] for rows in each]) for name in ("cos", "sin", "context_tokens")}
    slots = _layer_slots(torch.stack([rows["slots"].flatten() for rows in each]), layers, layer_slots)
    return {**joined, "slots": slots.reshape(-1, 1).contiguous(), "block_table": each[0]["block_table"]}


def _layer_slots(slots: Tensor, layers: int, layer_slots: int) -> Tensor:
    """The slots `[steps, rows]` of the first layer as those of all: INT32 `[steps, layers, rows]`."""
    return slots[:, None] + layer_slots * torch.arange(layers, dtype=torch.int32)[:, None]
