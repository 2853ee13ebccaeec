"""The PyPTO programs on an NPU: weights and caches live on the device, kernels are compiled once.

One compiled kernel serves every batch: the number of rows is not compiled in. Needs torch_npu, the driver and a CANN
toolkit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import BATCH_WINDOW_ROWS
from kernels.program_runner import build_kernel, runtime_options
from kernels.programs.base import Program, check_arguments, make_outputs
from kernels.programs.decode_layer import DecodeLayerSpec, decode_layer, layer_arguments, row_arguments
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.slabs import Slabs
from serving.executor.base import PAGE_TOKENS
from serving.executor.pypto import Rows, layer_matrices


class NpuPrograms:
    """`Programs` on the device `device`, by default the current NPU."""

    def __init__(self, slabs: Slabs, num_pages: int, device: str = "npu", kv: str = "bf16") -> None:
        import pypto

        config = slabs.config
        self._device = torch.device(device)
        self._real_vocab = slabs.real_vocab
        self._rope = (slabs.tensors["rope_cos"], slabs.tensors["rope_sin"])
        self._table_pages = -(-self._rope[0].shape[0] // PAGE_TOKENS)
        self._layer = decode_layer(DecodeLayerSpec.of(config, slabs.down, (1,), kv=kv))
        self._head = LmHeadGreedy(LmHeadSpec.of(config, BATCH_WINDOW_ROWS))
        options = {"runtime_options": runtime_options(pypto.RunMode.NPU)}
        self._layer_kernel = build_kernel(self._layer, options)
        self._head_kernel = build_kernel(self._head, options)
        slots = num_pages * PAGE_TOKENS
        caches = [a for a in self._layer.arguments() if a.direction == "inout"]
        self._cache_names = tuple(a.name for a in caches)
        self._layers = [
            {
                **self._moved({**layer_arguments(slabs.layer(index)), **matrices}),
                **{a.name: torch.zeros(slots, a.shape[1] or 1, dtype=a.dtype, device=self._device) for a in caches},
            }
            for index, matrices in enumerate(layer_matrices(kv, config))
        ]
        head_slabs = {
            "weight": slabs.tensors["lm_head_weight"],
            "final_norm": slabs.tensors["final_norm_weight"],
        }
        one_row = {"x": torch.zeros(1, config.hidden_size, dtype=torch.bfloat16)}
        self._head_tensors = {**self._moved(_scratch(self._head, one_row)), **self._moved(head_slabs)}
        self._scratch = self._moved(_scratch(self._layer, one_row))

    def run(self, rows: Rows, *, with_logits: bool) -> Tensor | None:
        """Run every layer on the device, and the LM head when logits are wanted."""
        arguments = row_arguments(rows.positions, rows.pages, *self._rope)
        table = torch.zeros(len(rows.positions), self._table_pages, dtype=torch.int32)
        table[:, : arguments["block_table"].shape[1]] = arguments["block_table"]
        arguments["block_table"] = table
        # Values are checked on the host, where they come from: reading them back from the device would wait for it.
        caches = {name: self._layers[0][name] for name in self._cache_names}
        self._layer.check_values({**arguments, **caches, "x": rows.x, "out": rows.x})
        moved, x = self._moved(arguments), rows.x.to(self._device)
        for layer in self._layers:
            tensors = {**self._scratch, **layer, **moved, "x": x, "out": torch.empty_like(x)}
            self._layer_kernel(*check_arguments(self._layer, tensors, values=False))
            x = tensors["out"]
        if not with_logits:
            return None
        outputs = {
            "logits": torch.empty(x.shape[0], self._real_vocab, device=self._device),
            "ids": torch.empty(x.shape[0], 1, dtype=torch.int32, device=self._device),
        }
        self._head_kernel(*check_arguments(self._head, {**self._head_tensors, **outputs, "x": x}, values=False))
        return outputs["logits"].cpu()

    def close(self) -> None:
        """Release the device's memory."""
        self._layers, self._head_tensors, self._scratch = [], {}, {}

    def _moved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}


def _scratch(program: Program, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scratch arguments of `program`, whose shapes do not depend on the batch."""
    made = make_outputs(program, tensors)
    return {a.name: made[a.name] for a in program.arguments() if a.direction == "scratch"}
