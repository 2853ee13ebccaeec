"""The PyPTO kernels of the parts of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pypto

from kernels.contract import BATCH_WINDOW_ROWS as WINDOW_ROWS
from kernels.programs import blocks, decode_stages, stages
from kernels.programs.layer_parts import (
    KvWrite,
    LayerPart,
    LayerPartSpec,
    NormQuantize,
    QkNormRope,
    QkvProject,
    SwigluMlp,
)


def build(program: LayerPart, options: dict[str, Any]) -> Any:
    """Return the jit-compiled kernel of `program`; `options` are the keyword arguments of `pypto.frontend.jit`."""
    body = _BODIES[type(program)]
    return blocks.jit_kernel(program, options, lambda tensors: body(program.spec, tensors))


def _norm_quantize(spec: LayerPartSpec, tensors: Any) -> None:
    for _ in pypto.loop(1, name="NORM", idx_name="norm"):
        pypto.set_vec_tile_shapes(1, spec.hidden_size)
        x_fp32 = blocks.to_fp32(tensors.x)
        rows = blocks.to_bf16(blocks.rms_norm_rows(x_fp32, tensors.input_rms, spec.rms_norm_eps))
        quantized = blocks.operand(rows, "int8")
        # A value that is assigned is used up, and these rows were quantized too.
        tensors.normed[:] = blocks.to_bf16(blocks.to_fp32(rows))
        tensors.codes[:] = quantized.values
        tensors.scale[:] = quantized.scale


def _qkv_project(spec: LayerPartSpec, tensors: Any) -> None:
    for _ in pypto.loop(1, name="PROJECT", idx_name="project"):
        queries, keys, values = stages.project(spec, stages.Slabs(tensors), tensors.x, tensors.cos, tensors.sin)
        tensors.q[:] = pypto.reshape(queries, [spec.rows, spec.q_size])
        tensors.k[:] = keys
        tensors.v[:] = values


def _qk_norm_rope(spec: LayerPartSpec, tensors: Any) -> None:
    for _ in pypto.loop(1, name="ROTATE", idx_name="rotate"):
        heads = pypto.reshape(tensors.projected, [spec.rows, spec.num_heads, spec.head_dim])
        if spec.qk_norm:
            heads = blocks.head_norm(heads, tensors.q_norm, spec.rms_norm_eps)
        rotated = blocks.rotate(heads, tensors.cos, tensors.sin)
        tensors.q[:] = pypto.reshape(rotated, [spec.rows, spec.q_size])


def _kv_write(spec: LayerPartSpec, tensors: Any) -> None:
    for _ in pypto.loop(1, name="WRITE", idx_name="write"):
        pypto.set_vec_tile_shapes(1, spec.kv_size)
        tensors.k_cache[:] = pypto.scatter_update(tensors.k_cache, -2, tensors.slots, tensors.k)
        tensors.v_cache[:] = pypto.scatter_update(tensors.v_cache, -2, tensors.slots, tensors.v)


def _swiglu_mlp(spec: LayerPartSpec, tensors: Any) -> None:
    slabs, hidden = stages.Slabs(tensors), spec.hidden_size
    window = decode_stages.Window(0, spec.rows)
    left = decode_stages.operand_room(spec)
    kept = pypto.tensor([WINDOW_ROWS, hidden], pypto.DT_FP32, "kept")
    for _ in pypto.loop(1, name="NORM", idx_name="norm"):
        rows = window.view(tensors.residual, hidden)
        decode_stages.keep(stages.normed(spec, rows, slabs.vector("post_rms"), spec.rows), left)
        pypto.set_vec_tile_shapes(1, hidden)
        kept[:] = pypto.add(rows, 0.0)
    decode_stages.finish_mlp(spec, slabs, left, kept, window, tensors.out)


_BODIES: dict[type[LayerPart], Callable[[LayerPartSpec, Any], None]] = {
    NormQuantize: _norm_quantize,
    QkvProject: _qkv_project,
    QkNormRope: _qk_norm_rope,
    KvWrite: _kv_write,
    SwigluMlp: _swiglu_mlp,
}
