"""GPTQ for INT8 per channel: each rounding error is made up for by the columns still to come.

After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022), with
act-order and damping. The Hessian is that of the quantized inputs: what the layer will really read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.errors import CalibrationError
from quantize.numerics import INT8_MAX

MAX_DAMPING = 10.0
DAMPING_STEP = 10.0
logger = logging.getLogger(__name__)


class InputMoments:
    """Second moments of one Linear input over calibration tokens, FP64 `[k, k]`, w a token's weight.

    `hessian` is `sum_t w_t x' x'^T` of the rounded inputs x', `lost` is `sum_t w_t (x - x') x'^T` (None unless
    `compensate`).
    """

    def __init__(self, k: int, *, compensate: bool = True) -> None:
        self.hessian = torch.zeros(k, k, dtype=torch.float64)
        self.lost = torch.zeros(k, k, dtype=torch.float64) if compensate else None
        self.tokens = 0

    def add(self, inputs: Tensor, rounded: Tensor, token_weights: Tensor) -> None:
        """Add tokens: inputs FP32 `[tokens, k]`, the same rounded, weights FP32 `[tokens]`.

        The product of one call is FP32, sums over calls are FP64; so a call should have a few thousand tokens at most.
        """
        weighted = rounded * token_weights.unsqueeze(1)
        self.hessian += (weighted.T @ rounded).to(torch.float64)
        if self.lost is not None:
            self.lost += ((inputs - rounded).T @ weighted).to(torch.float64)
        self.tokens += len(inputs)


@dataclass(frozen=True)
class GptqFactor:
    """What GPTQ needs of a Hessian, shared by the Linears that read one input.

    `order` INT64 `[k]` is the order of the columns; `inverse_root` FP32 `[k, k]` is upper triangular with
    `inverse(H) = inverse_root^T inverse_root` in that order. `damping` is what was really added, as a share of the mean
    diagonal; `attempts` counts the factorizations it took. `compensation` FP32 `[k, k]` is `lost H^-1`, or None.
    """

    order: Tensor
    inverse_root: Tensor
    compensation: Tensor | None
    damping: float
    attempts: int


def factor_hessian(moments: InputMoments, damping: float, act_order: bool, name: str) -> GptqFactor:
    """Damp and factor a Hessian; a matrix that is not positive definite gets ten times the damping, and again.

    Inputs that were always zero get the mean diagonal for their own. Raises CalibrationError naming `name` when the
    sums are not finite, or when even `MAX_DAMPING` does not help.
    """
    hessian = moments.hessian
    diagonal = hessian.diagonal()
    if not bool(torch.isfinite(diagonal).all()) or float(diagonal.sum()) <= 0:
        raise CalibrationError(
            f"{name}: the calibration activations are {'all zero' if float(diagonal.sum()) == 0 else 'not finite'}; "
            "GPTQ needs finite inputs that are not zero. Use other calibration text, or algorithm rtn"
        )
    mean = diagonal.mean()
    dead = diagonal == 0
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(diagonal))
    attempts = 0
    while damping <= MAX_DAMPING:
        attempts += 1
        damped = hessian + torch.diag(torch.where(dead, mean, damping * mean))
        root, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            inverse = torch.cholesky_inverse(root)[order][:, order]
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                lost, compensation = moments.lost, None
                if lost is not None:
                    compensation = torch.cholesky_solve(lost.T, root).T.to(torch.float32).contiguous()
                return GptqFactor(order, upper.to(torch.float32), compensation, damping, attempts)
        logger.warning(
            "%s: the Hessian is not positive definite with damping %g, trying %g", name, damping, damping * DAMPING_STEP
        )
        damping *= DAMPING_STEP
    raise CalibrationError(
        f"{name}: the Hessian over {moments.tokens} tokens cannot be inverted even with damping {MAX_DAMPING}; "
        "use more or more varied calibration text"
    )


def gptq_codes(weight: Tensor, scale: Tensor, factor: GptqFactor, block_columns: int) -> Tensor:
    """Codes INT8 `[out, in]` of `weight` FP32 `[out, in]` under scales FP32 `[out, 1]`, errors carried forward.

    Column by column in `factor.order`: `q = clamp(rint(w / s))`, `e = (w - q s) / U[i, i]`, and the columns to come
    lose `e U[i, :]`; blocks of `block_columns` only bundle those updates.
    """
    remaining = weight[:, factor.order].clone()
    codes = torch.empty_like(remaining)
    root, columns = factor.inverse_root, remaining.shape[1]
    column_scale = scale[:, 0]
    for start in range(0, columns, block_columns):
        stop = min(start + block_columns, columns)
        block, errors = remaining[:, start:stop].T.contiguous(), torch.empty(stop - start, len(weight))
        within = root[start:stop, start:stop]
        for i in range(stop - start):
            q = (block[i] / column_scale).round_().clamp_(-INT8_MAX, INT8_MAX)
            codes[:, start + i] = q
            errors[i] = (block[i] - q * column_scale) / within[i, i]
            block[i + 1 :].addr_(within[i, i + 1 :], errors[i], alpha=-1)
        remaining[:, stop:].addmm_(errors.T, root[start:stop, stop:], alpha=-1)
    unsorted = torch.empty_like(codes)
    unsorted[:, factor.order] = codes
    return unsorted.to(torch.int8)
