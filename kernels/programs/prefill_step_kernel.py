"""The PyPTO kernel of `prefill_step`: layers in a loop over stacked slabs, then the LM head on sequences' last rows.

Every loop waits for the one before it. The hidden rows stay in place in the argument `x`.
"""

from __future__ import annotations

from typing import Any

import pypto

from kernels.programs import blocks, lm_head_kernel, prefill_stages
from kernels.programs.prefill_step import PrefillStep


def build(program: PrefillStep, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    spec = program.spec
    head = spec.head

    def step_of_chunks(tensors: Any) -> None:
        layers = tensors.input_rms.shape[0]
        layer_slots = tensors.k_cache.shape[0] // layers
        for layer in pypto.loop(0, layers, 1, name="LAYERS", idx_name="layer", submit_before_loop=True):
            at = prefill_stages.LayerAt(layer=layer, first_slot=layer * layer_slots)
            prefill_stages.layer_stages(spec.layer, at, tensors, tensors.x, tensors.x, tensors.hidden_rows)
        sequences = tensors.context_tokens.shape[0]
        for sequence in pypto.loop(0, sequences, 1, name="LAST", idx_name="sequence", submit_before_loop=True):
            _take_last_row(sequence, tensors)
        window = spec.head.window_rows
        windows = (sequences + window - 1) // window
        for index in pypto.loop(0, windows, 1, name="WINDOWS", idx_name="window", submit_before_loop=True):
            first = index * window
            valid = pypto.min(sequences - first, window)
            lm_head_kernel.window_logits(
                head, tensors.hidden_rows, tensors.lm_head_weight, tensors, first, valid, first
            )
            for _ in pypto.loop(0, 1, 1, name="SAMPLE", idx_name="sample", submit_before_loop=True):
                best = lm_head_kernel.best_ids(head, tensors.block_maxima, tensors.block_ids, valid)
                pypto.assemble(best, [first, 0], tensors.ids)
        for sequence in pypto.loop(0, sequences, 1, name="NEXT", idx_name="chosen", submit_before_loop=True):
            chosen = pypto.view(tensors.ids, [1, 1], [sequence, 0])
            pypto.assemble(blocks.gather_rows(tensors.embed_weight, chosen), [sequence, 0], tensors.next_rows)

    return blocks.jit_kernel(program, options, step_of_chunks)


def _take_last_row(sequence: Any, tensors: Any) -> None:
    """Copy the hidden row of a sequence's last token to its place in the scratch, which the layers are done with."""
    width = tensors.x.shape[1]
    pypto.set_vec_tile_shapes(1, width)
    row = pypto.view(tensors.x, [1, width], [tensors.row_starts[sequence + 1] - 1, 0])
    pypto.assemble(row, [sequence, 0], tensors.hidden_rows)
