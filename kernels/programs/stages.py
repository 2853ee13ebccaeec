"""The dense stages of a decoder layer over a window of rows, of which the first `valid_rows` are real (all when None).

`project` is everything before attention; `output`, `up` and `down` are everything after it. Decode and prefill are made
of them; a caller decides which of them share a loop. Imported only where a program is built.
"""

from __future__ import annotations

from typing import Any

import pypto

from kernels.programs import blocks
from kernels.programs.decode_tiles import LayerTiles

__all__ = ["Slabs", "down", "normed", "output", "project", "up"]


class Slabs:
    """One layer's slabs among those of a program, stacked `[layers * k, n]` or `[layers, n]`.

    `tensors` has them as attributes; `layer` is the layer's index, which may be symbolic.
    """

    def __init__(self, tensors: Any, layer: Any = 0) -> None:
        self._tensors = tensors
        self._layer = layer

    def matrix(self, name: str, rows: int) -> Any:
        """The layer's `[rows, n]` of a stacked matrix."""
        slab = getattr(self._tensors, name)
        return pypto.view(slab, [rows, slab.shape[1]], [self._layer * rows, 0])

    def vector(self, name: str) -> Any:
        """The layer's `[1, n]` of a stacked vector."""
        slab = getattr(self._tensors, name)
        return pypto.view(slab, [1, slab.shape[1]], [self._layer, 0])


def project(spec: Any, slabs: Slabs, x: Any, cos: Any, sin: Any, valid_rows: Any = None) -> tuple[Any, Any, Any]:
    """Norm, project, normalise heads, rotate: BF16 `[rows, hidden]` to BF16 q `[rows, heads, dim]`, k and v 2-D.

    `spec` is a layer's specification (`DecodeLayerSpec` or one with the same shape fields); `cos`, `sin` FP32
    `[rows, dim]`.
    """
    rows, hidden, dim = x.shape[0], spec.hidden_size, spec.head_dim
    tiles = LayerTiles(spec, rows)
    pypto.set_vec_tile_shapes(1, hidden)
    left = normed(spec, blocks.to_fp32(x), slabs.vector("input_rms"), valid_rows)

    def projected(name: str, tile: Any) -> Any:
        weight, scale = slabs.matrix(f"w{name}", hidden), slabs.vector(f"w{name}_scale")
        value = blocks.linear(left, weight, scale, tile, valid_rows, whole_rows=True)
        return pypto.add(value, slabs.vector(f"{name}_bias")) if spec.qkv_bias else value

    def rotated(name: str, tile: Any, heads: int) -> Any:
        by_head = blocks.reshape_rows(projected(name, tile), [rows, heads, dim], valid_rows)
        if spec.qk_norm:
            by_head = blocks.head_norm(by_head, slabs.vector(f"{name}_norm"), spec.rms_norm_eps)
        return blocks.rotate(by_head, cos, sin, valid_rows)

    k = blocks.reshape_rows(rotated("k", tiles.key_value(), spec.num_kv_heads), [rows, spec.kv_size], valid_rows)
    v = blocks.to_bf16(projected("v", tiles.key_value()))
    return rotated("q", tiles.query(), spec.num_heads), k, v


def output(spec: Any, slabs: Slabs, x: Any, context: Any, valid_rows: Any = None) -> tuple[Any, blocks.Operand]:
    """Output projection and residual, then the MLP's norm: the FP32 residual `[rows, hidden]`, and the MLP's operand.

    `x` BF16 `[rows, hidden]` is the layer's input, `context` BF16 `[rows, heads * dim]` the attention's output.
    """
    left = blocks.operand(context, spec.weights, valid_rows)
    weight, scale = slabs.matrix("wo", spec.q_size), slabs.vector("wo_scale")
    tile = LayerTiles(spec, x.shape[0]).output()
    projected = blocks.linear(left, weight, scale, tile, valid_rows, whole_rows=True)
    residual = pypto.add(blocks.to_fp32(x), projected)
    return residual, normed(spec, residual, slabs.vector("post_rms"), valid_rows)


def up(spec: Any, slabs: Slabs, left: blocks.Operand, valid_rows: Any = None) -> Any:
    """The MLP up to its activation: BF16 `[rows, intermediate]` = SiLU(gate) * up."""
    tile, hidden = LayerTiles(spec, left.values.shape[0]).up(), spec.hidden_size
    gate, up = (
        blocks.linear(left, slabs.matrix(name, hidden), slabs.vector(f"{name}_scale"), tile, valid_rows)
        for name in ("w_gate", "w_up")
    )
    return blocks.to_bf16(pypto.mul(blocks.silu(gate), up))


def down(spec: Any, slabs: Slabs, left: blocks.Operand, residual: Any, valid_rows: Any = None) -> Any:
    """Down projection of the activated rows and residual, narrowed once, to BF16 `[rows, hidden]`."""
    rows = residual.shape[0]
    tile = LayerTiles(spec, rows).down()
    weight, scale = slabs.matrix("w_down", spec.intermediate_size), slabs.vector("w_down_scale")
    value = blocks.linear(left, weight, scale, tile, valid_rows)
    # The residual was made in tiles of whole rows, of which a window's last may have no valid row.
    return blocks.to_bf16(pypto.add(blocks.whole(residual, valid_rows), value))


def normed(spec: Any, x_fp32: Any, gamma: Any, valid_rows: Any) -> blocks.Operand:
    """RMS-normalise FP32 rows, narrow them to BF16, and make them the operand of the weights that follow."""
    narrowed = blocks.to_bf16(blocks.rms_norm_rows(x_fp32, gamma, spec.rms_norm_eps, valid_rows))
    return blocks.operand(narrowed, spec.weights, valid_rows)
