"""The PyPTO kernel of `decode_step`: layers in a loop over stacked slabs, LM head, greedy ids, the next embedding rows.

Every loop waits for the one before it. The hidden rows stay in place in the argument `x`.
"""

from __future__ import annotations

from typing import Any

import pypto

from kernels.programs import blocks, decode_stages, lm_head_kernel
from kernels.programs.decode_step import DecodeStep
from kernels.programs.lm_head import LmHeadSpec


def build(program: DecodeStep, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec = program.spec
    head = spec.head

    def steps_of_rows(tensors: Any) -> None:
        batch, layers = tensors.x.shape[0], tensors.input_rms.shape[0]
        steps = tensors.context_tokens.shape[0] // batch
        layer_slots = tensors.k_cache.shape[0] // layers
        for step in pypto.loop(0, steps, 1, name="STEPS", idx_name="step"):
            for layer in pypto.loop(0, layers, 1, name="LAYERS", idx_name="layer", submit_before_loop=True):
                at = decode_stages.LayerAt(
                    layer=layer,
                    first_slot=layer * layer_slots,
                    slots_row=(step * layers + layer) * batch,
                    first_row=step * batch,
                )
                decode_stages.layer_stages(spec.layer, at, tensors, tensors.x, tensors.x)
            _next_tokens(head, tensors, step * batch)

    return blocks.jit_kernel(program, options, steps_of_rows)


def _next_tokens(head: LmHeadSpec, tensors: Any, first_row: Any) -> None:
    """Logits and ids of one step, whose rows start at `first_row` of both, and the embedding rows of the ids."""
    for window in decode_stages.windows(tensors.x.shape[0]):
        lm_head_kernel.window_logits(
            head, tensors.x, tensors.lm_head_weight, tensors, window.first, window.valid, first_row + window.first
        )
        for _ in pypto.loop(0, 1, 1, name="SAMPLE", idx_name="sample", submit_before_loop=True):
            # Rows beyond the batch are gathered too, by whatever their scratch holds, and not written: a gather of some
            # valid rows by ids that were just made fails in the interpreter's late passes.
            best = lm_head_kernel.best_ids(head, tensors.block_maxima, tensors.block_ids)
            # In one row: ids in a column give rows that must be copied to be put together.
            chosen = pypto.reshape(pypto.clip(best, 0, head.real_vocab - 1), [head.window_rows])
            pypto.set_vec_tile_shapes(1, head.hidden_size)
            rows = pypto.index_select(tensors.embed_weight, 0, chosen)
            pypto.assemble(blocks.whole(rows, window.valid), [window.first, 0], tensors.x)
            pypto.assemble(blocks.whole(best, window.valid), [first_row + window.first, 0], tensors.ids)
