"""The PyPTO programs on an NPU: weights and caches live on the device, kernels are compiled once.

The window is always 16 rows: missing ones are padded, each with a slot of its own in a scratch page behind the engine's
pages, so that one compiled kernel serves every batch. Needs torch_npu, the driver and a CANN toolkit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import BATCH_WINDOW_ROWS
from kernels.program_runner import build_kernel
from kernels.programs.base import check_arguments, make_outputs
from kernels.programs.decode_layer import DecodeLayer, DecodeLayerSpec, layer_arguments, row_arguments
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.slabs import Slabs
from serving.executor.base import PAGE_TOKENS
from serving.executor.pypto import Window


class NpuPrograms:
    """`Programs` on the device `device`, by default the current NPU."""

    def __init__(self, slabs: Slabs, num_pages: int, device: str = "npu") -> None:
        import pypto

        config = slabs.config
        self._device = torch.device(device)
        self._scratch_page = num_pages
        self._rope = (slabs.tensors["rope_cos"], slabs.tensors["rope_sin"])
        self._table_pages = -(-self._rope[0].shape[0] // PAGE_TOKENS)
        contexts = tuple(range(1, BATCH_WINDOW_ROWS + 1))
        self._layer = DecodeLayer(DecodeLayerSpec.of(config, slabs.down, contexts))
        self._head = LmHeadGreedy(LmHeadSpec.of(config, BATCH_WINDOW_ROWS))
        options = {"runtime_options": {"run_mode": pypto.RunMode.NPU}}
        self._layer_kernel = build_kernel(self._layer, options)
        self._head_kernel = build_kernel(self._head, options)
        slots = (num_pages + 1) * PAGE_TOKENS
        self._layers = [
            {
                **self._moved(layer_arguments(slabs.layer(index))),
                "k_cache": torch.zeros(slots, config.kv_size, dtype=torch.bfloat16, device=self._device),
                "v_cache": torch.zeros(slots, config.kv_size, dtype=torch.bfloat16, device=self._device),
            }
            for index in range(config.num_layers)
        ]
        head_slabs = {
            "weight": slabs.tensors["lm_head_weight"],
            "final_norm": slabs.tensors["final_norm_weight"],
        }
        window = torch.zeros(BATCH_WINDOW_ROWS, config.hidden_size, dtype=torch.bfloat16)
        self._head_tensors = {**self._moved(make_outputs(self._head, {"x": window})), **self._moved(head_slabs)}
        self._scratch = self._moved(make_outputs(self._layer, {"x": window}))

    def run(self, window: Window, *, with_logits: bool) -> Tensor | None:
        """Run every layer on the device, and the LM head when logits are wanted."""
        real_rows = len(window.positions)
        window = window.padded(BATCH_WINDOW_ROWS, self._scratch_page)
        rows = row_arguments(window.positions, window.pages, *self._rope)
        table = torch.zeros(BATCH_WINDOW_ROWS, self._table_pages, dtype=torch.int32)
        table[:, : rows["block_table"].shape[1]] = rows["block_table"]
        rows["block_table"] = table
        # Values are checked on the host, where they come from: reading them back from the device would wait for it.
        caches = {name: self._layers[0][name] for name in ("k_cache", "v_cache")}
        self._layer.check_values({**rows, **caches})
        moved, x = self._moved(rows), window.x.to(self._device)
        for layer in self._layers:
            tensors = {**self._scratch, **layer, **moved, "x": x, "out": torch.empty_like(x)}
            self._layer_kernel(*check_arguments(self._layer, tensors, values=False))
            x = tensors["out"]
        if not with_logits:
            return None
        tensors = {**self._head_tensors, "x": x}
        self._head_kernel(*check_arguments(self._head, tensors, values=False))
        logits: Tensor = tensors["logits"][:real_rows].cpu()
        return logits

    def close(self) -> None:
        """Release the device's memory."""
        self._layers, self._head_tensors, self._scratch = [], {}, {}

    def _moved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}
