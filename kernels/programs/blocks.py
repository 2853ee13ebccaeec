"""Building blocks that PyPTO kernels inline: norm, quantization, linears of both weight forms, rotary embedding.

Imported only where a program is built: importing pypto binds its log and output folders. Two habits of PyPTO matter
here: `target[:] = value` consumes `value`, and a binary operation broadcasts one axis only.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pypto
import torch

from kernels.programs.base import Program
from kernels.programs.layer_slabs import WeightForm
from kernels.tiles import CubeTile, dequant_rows, row_columns, row_tile
from quantize.numerics import ACTIVATION_AMAX_EPS, INT8_MAX

RINT = pypto.CastMode.CAST_RINT
"""Round half to even: stated at every narrowing, since the default mode differs between backends."""

_DTYPES = {
    torch.float32: pypto.DT_FP32,
    torch.bfloat16: pypto.DT_BF16,
    torch.int32: pypto.DT_INT32,
    torch.int8: pypto.DT_INT8,
}


@dataclass(frozen=True)
class Operand:
    """The left operand of linears: BF16 rows, or their INT8 codes with FP32 scales `[rows, 1]`."""

    values: Any
    scale: Any = None


def parameter_types(program: Program) -> SimpleNamespace:
    """PyPTO's type of every argument of `program`, as attributes: what a kernel's parameters are annotated with."""
    types = {}
    for argument in program.arguments():
        shape = [pypto.DYNAMIC if size is None else size for size in argument.shape]
        types[argument.name] = pypto.Tensor(shape, _DTYPES[argument.dtype])
    return SimpleNamespace(**types)


def jit_kernel(program: Program, options: dict[str, Any], body: Callable[[Any], None]) -> Any:
    """The jit-compiled kernel of `program`: its arguments are the parameters, and `body` is called with all of them.

    `options` are the keyword arguments of `pypto.frontend.jit`; `body` finds the arguments as attributes. PyPTO reads a
    kernel's parameters and statements from its source, so there is one: two lines made from the program's arguments,
    which is where their order and types are stated. PyPTO runs `body`, an attribute there, as Python.
    """
    names = [argument.name for argument in program.arguments()]
    parameters = ", ".join(f"{name}: types.{name}" for name in names)
    values = ", ".join(f"{name}={name}" for name in names)
    source = f"def {program.name}({parameters}):\n    kernel.body(python.SimpleNamespace({values}))\n"
    file = f"<kernel {program.name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"types": parameter_types(program), "kernel": SimpleNamespace(body=body), "python": types}
    exec(compile(source, file, "exec", dont_inherit=True), scope)
    return pypto.frontend.jit(**options)(scope[program.name])


def to_fp32(value: Any) -> Any:
    """Widen to FP32 (exact)."""
    return pypto.cast(value, pypto.DT_FP32)


def to_bf16(value: Any) -> Any:
    """Narrow FP32 to BF16, half to even."""
    return pypto.cast(value, pypto.DT_BF16, RINT)


def whole(value: Any, valid_rows: Any = None) -> Any:
    """State that all of a 2-D value is valid, or that `valid_rows` of its rows are.

    Without it the interpreter's checks of the first passes find an empty valid shape (error FB200B, and no verdict)
    where a vector tile takes some rows of several matmul tiles.
    """
    rows, width = value.shape
    return pypto.view(value, [rows, width], [0, 0], valid_shape=[rows if valid_rows is None else valid_rows, width])


def reshape_rows(value: Any, shape: list[int], valid_rows: Any = None) -> Any:
    """`value` in another shape, of which the first `valid_rows` are valid (all, when None).

    A reshape with a valid shape of its own fails in the interpreter's late passes, so all of it is called valid first.
    A result that is assembled without a further operation is written whole: its target must have room for it.
    """
    reshaped = pypto.reshape(value, shape, valid_shape=shape)
    if valid_rows is None:
        return reshaped
    return pypto.view(reshaped, shape, [0] * len(shape), valid_shape=[valid_rows, *shape[1:]])


def inverse_rms(x_fp32: Any, width: int, eps: float) -> Any:
    """`1 / sqrt(mean(x^2) + eps)` over the last axis, kept as an axis of one."""
    mean = pypto.div(pypto.sum(pypto.mul(x_fp32, x_fp32), -1, keepdim=True), float(width))
    return pypto.reciprocal(pypto.sqrt(pypto.add(mean, eps)))


def rms_norm_rows(x_fp32: Any, gamma: Any, eps: float, valid_rows: Any = None) -> Any:
    """RMS-normalise FP32 `[rows, width]` by gamma `[1, width]`; tiles of whole rows, so no reduction is split."""
    rows, width = x_fp32.shape
    x_fp32 = whole(x_fp32, valid_rows)
    pypto.set_vec_tile_shapes(row_tile(rows, width), width)
    return pypto.mul(pypto.mul(x_fp32, inverse_rms(x_fp32, width, eps)), gamma)


def quantize_rows(x_bf16: Any, valid_rows: Any = None) -> tuple[Any, Any]:
    """Quantize BF16 `[rows, width]` per row: INT8 codes and FP32 scales `[rows, 1]`, as `quantize_activation`.

    INT8 is reached through INT32 and FP16, both exact here: the device has no direct conversion from FP32.
    """
    rows, width = x_bf16.shape
    pypto.set_vec_tile_shapes(row_tile(rows, width), row_columns(width))
    x_fp32 = to_fp32(whole(x_bf16, valid_rows))
    amax = pypto.clip(pypto.amax(pypto.abs(x_fp32), -1, keepdim=True), ACTIVATION_AMAX_EPS)
    valid = [rows if valid_rows is None else valid_rows, 1]
    limit = pypto.full([rows, 1], float(INT8_MAX), pypto.DT_FP32, valid_shape=valid)
    scaled = pypto.mul(x_fp32, pypto.div(limit, amax))
    codes = pypto.clip(pypto.cast(scaled, pypto.DT_INT32, RINT), -INT8_MAX, INT8_MAX)
    codes_fp16 = pypto.cast(to_fp32(codes), pypto.DT_FP16, RINT)
    return pypto.cast(codes_fp16, pypto.DT_INT8), pypto.div(amax, float(INT8_MAX))


def operand(x_bf16: Any, form: WeightForm, valid_rows: Any = None) -> Operand:
    """BF16 `[rows, width]` as weights of `form` take it: quantized per row for INT8 ones."""
    return Operand(*quantize_rows(x_bf16, valid_rows)) if form == "int8" else Operand(x_bf16)


def linear(
    left: Operand, weight: Any, weight_scale: Any, tile: CubeTile, valid_rows: Any = None, *, whole_rows: bool = False
) -> Any:
    """Rows `[rows, k]` by a weight `[k, n]` of the same form, FP32 `[rows, n]`.

    INT8: `(acc * weight_scale) * scale`; BF16: summed in FP32, and `weight_scale` is not read. With `whole_rows` the
    result is made in tiles of whole rows, for a norm or a rotation that follows; else in pairs of matmul tiles.
    """
    rows, columns = left.values.shape[0], weight.shape[1]
    pypto.set_cube_tile_shapes(*tile.shapes())
    int8 = left.scale is not None
    accumulator = pypto.matmul(left.values, weight, pypto.DT_INT32 if int8 else pypto.DT_FP32)
    vector_rows, vector_columns = row_tile(rows, columns), columns
    if not whole_rows:
        vector_rows, vector_columns = dequant_rows(rows, tile), 2 * tile.n
    if whole_rows or vector_rows < rows:
        accumulator = whole(accumulator, valid_rows)
    pypto.set_vec_tile_shapes(vector_rows, vector_columns)
    return pypto.mul(pypto.mul(to_fp32(accumulator), weight_scale), left.scale) if int8 else accumulator


def linear_bf16(x_bf16: Any, weight: Any, tile: CubeTile, *, transposed: bool = False) -> Any:
    """BF16 `[rows, k]` by BF16 `[k, n]` (or `[n, k]` when transposed), accumulated in FP32."""
    pypto.set_cube_tile_shapes(*tile.shapes())
    return pypto.matmul(x_bf16, weight, pypto.DT_FP32, b_trans=transposed)


def head_norm(heads_fp32: Any, gamma: Any, eps: float) -> Any:
    """RMS-normalise each head of FP32 `[rows, heads, dim]` by gamma `[1, dim]`."""
    rows, heads, dim = heads_fp32.shape
    pypto.set_vec_tile_shapes(row_tile(rows, heads * dim), heads, dim)
    normed = pypto.mul(heads_fp32, inverse_rms(heads_fp32, dim, eps))
    return pypto.mul(normed, pypto.expand_clone(pypto.reshape(gamma, [1, 1, dim]), [1, heads, dim]))


def rotate(heads_fp32: Any, cos: Any, sin: Any, valid_rows: Any = None) -> Any:
    """Rotate FP32 `[rows, heads, dim]` by tables FP32 `[rows, dim]`, half split; returns BF16."""
    rows, heads, dim = heads_fp32.shape
    half = dim // 2
    pypto.set_vec_tile_shapes(row_tile(rows, heads * dim), heads, dim)
    low = pypto.view(heads_fp32, [rows, heads, half], [0, 0, 0])
    high = pypto.view(heads_fp32, [rows, heads, half], [0, 0, half])
    cos3, sin3 = (reshape_rows(table, [rows, 1, dim], valid_rows) for table in (cos, sin))
    cos_low, cos_high = (pypto.view(cos3, [rows, 1, half], [0, 0, at]) for at in (0, half))
    sin_low, sin_high = (pypto.view(sin3, [rows, 1, half], [0, 0, at]) for at in (0, half))
    rotated_low = pypto.sub(pypto.mul(low, cos_low), pypto.mul(high, sin_low))
    rotated_high = pypto.add(pypto.mul(high, cos_high), pypto.mul(low, sin_high))
    return to_bf16(pypto.concat([rotated_low, rotated_high], -1))


def silu(gate: Any) -> Any:
    """`gate * (1 / (1 + exp(-gate)))` in FP32."""
    return pypto.mul(gate, pypto.reciprocal(pypto.add(pypto.exp(pypto.neg(gate)), 1.0)))


def gather_rows(table: Any, ids: Any) -> Any:
    """Rows of `table` `[count, width]` at INT32 `ids` `[rows, 1]`, as `[rows, width]`."""
    rows, width = ids.shape[0], table.shape[1]
    pypto.set_vec_tile_shapes(1, 1, width)
    return pypto.reshape(pypto.index_select(table, 0, ids), [rows, width])
