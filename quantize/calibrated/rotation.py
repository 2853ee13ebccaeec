"""Rotations folded into weights: outliers of the residual stream, spread over all of its channels.

An RMSNorm without weights commutes with any orthogonal matrix, so once the norms' weights are folded into the Linears
that follow, the whole residual stream may be turned: embedding and every producer on one side, every consumer and the
LM head on the other. So may each head of v, undone in o_proj. After Ashkboos et al., "QuaRot" (2024); nothing is left
to do at run time. A Hadamard matrix with random signs makes the largest entry of any vector small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.calibrated.decoder import INPUT_NORM, POST_NORM, SITES, Layer
from quantize.model_config import ModelConfig

O_PROJ, V_PROJ, DOWN_PROJ = "self_attn.o_proj", "self_attn.v_proj", "mlp.down_proj"


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in range(2, int(n**0.5) + 1))


def _quadratic_residues(q: int) -> Tensor:
    """Jacobsthal matrix of a prime q: entry (i, j) is 1, -1 or 0 as i - j is a square, none, or zero modulo q."""
    squares = {i * i % q for i in range(1, q)}
    symbol = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)], dtype=torch.float64)
    index = torch.arange(q)
    return symbol[(index.unsqueeze(1) - index.unsqueeze(0)) % q]


def hadamard(order: int) -> Tensor | None:
    """A matrix FP64 `[order, order]` of +-1 with orthogonal rows, or None where no construction here has that order.

    Sylvester's doubling over Paley's matrices ("On orthogonal matrices", 1933): orders `q + 1` for primes q = 3 mod 4
    and `2 (q + 1)` for primes q = 1 mod 4, times any power of two.
    """
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order % 2:
        return None
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    half = hadamard(order // 2)
    if half is not None:
        return torch.kron(two, half)
    if order % 4 == 0 and _is_prime(order - 1):
        core = torch.zeros(order, order, dtype=torch.float64)
        core[0, 1:], core[1:, 0], core[1:, 1:] = 1, -1, _quadratic_residues(order - 1)
        return core + torch.eye(order, dtype=torch.float64)
    q = order // 2 - 1
    if order % 4 == 0 and q % 4 == 1 and _is_prime(q):
        core = torch.zeros(q + 1, q + 1, dtype=torch.float64)
        core[0, 1:], core[1:, 0], core[1:, 1:] = 1, 1, _quadratic_residues(q)
        corner = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(core, two) + torch.kron(torch.eye(q + 1, dtype=torch.float64), corner)
    return None


def orthogonal_matrix(order: int, seed: int) -> Tensor:
    """An orthogonal matrix FP64 `[order, order]`: random signs by `seed`, then a Hadamard matrix over its root.

    An order that has none is cut into equal blocks of the largest power of two that divides it.
    """
    whole = hadamard(order)
    block = order if whole is not None else order & -order
    core = whole if whole is not None else hadamard(block)
    if core is None:
        raise ValueError(f"no Hadamard matrix of order {block}, a power of two")
    signs = torch.randint(0, 2, (order,), generator=torch.Generator().manual_seed(seed)).to(torch.float64) * 2 - 1
    spread = torch.kron(torch.eye(order // block, dtype=torch.float64), core) / block**0.5
    turned: Tensor = signs.unsqueeze(1) * spread
    return turned


@dataclass(frozen=True)
class Rotation:
    """`residual` FP32 `[hidden, hidden]` turns rows of the residual stream, `head` FP32 `[head_dim, head_dim]` v's."""

    residual: Tensor
    head: Tensor


def make_rotation(config: ModelConfig, seed: int) -> Rotation:
    """The rotation of a model by `seed`; the same on every machine."""
    return Rotation(
        orthogonal_matrix(config.hidden_size, seed).to(torch.float32),
        orthogonal_matrix(config.head_dim, seed + 1).to(torch.float32),
    )


def rotate_layer(layer: Layer, config: ModelConfig, rotation: Rotation) -> None:
    """Fold the norms' weights and both rotations into a layer, in place; its norms become ones.

    The layer then maps `x R` to `y R` where it mapped x to y (to FP32 rounding). QK norms stay: they see q and k, which
    no rotation reaches.
    """
    for site, norm in (("qkv", INPUT_NORM), ("gate_up", POST_NORM)):
        for name in SITES[site]:
            layer.weights[name] = (layer.weights[name] * layer.norms[norm]) @ rotation.residual
        layer.norms[norm] = torch.ones_like(layer.norms[norm])
    hidden = config.hidden_size
    value = layer.weights[V_PROJ].view(config.num_kv_heads, config.head_dim, hidden)
    layer.weights[V_PROJ] = (rotation.head.T @ value).reshape(config.kv_size, hidden)
    if V_PROJ in layer.biases:
        heads = layer.biases[V_PROJ].view(config.num_kv_heads, config.head_dim)
        layer.biases[V_PROJ] = (heads @ rotation.head).reshape(config.kv_size)
    output = layer.weights[O_PROJ].view(hidden, config.num_heads, config.head_dim) @ rotation.head
    layer.weights[O_PROJ] = rotation.residual.T @ output.reshape(hidden, config.q_size)
    layer.weights[DOWN_PROJ] = rotation.residual.T @ layer.weights[DOWN_PROJ]


def rotate_embedding(rows_fp32: Tensor, rotation: Rotation) -> Tensor:
    """Rows of the embedding FP32 `[ids, hidden]`, turned."""
    return rows_fp32 @ rotation.residual


def rotate_head(rows_fp32: Tensor, final_norm: Tensor, rotation: Rotation) -> Tensor:
    """Rows of the LM head FP32 `[ids, hidden]` with the final norm's weights folded in, turned."""
    return (rows_fp32 * final_norm) @ rotation.residual
