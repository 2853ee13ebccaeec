"""The packed cache and attention over it in the rotated space, held against decoding every vector."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.errors import ContractError
from kernels.goldens import paged_attention
from kernels.turboquant import TurboQuant, theoretical_mse
from kernels.turboquant_cache import code_columns, encode_rows, norm_columns, read_rows, turboquant_attention

HEADS, KV_HEADS, DIM = 4, 2, 64
FORMATS = [(2, False), (3, False), (4, False), (2, True), (3, True), (4, True)]


def rows(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize(("bits", "sketch"), FORMATS)
def test_what_is_read_of_a_row_is_the_decoded_vector_turned(bits: int, sketch: bool) -> None:
    codec = TurboQuant(DIM, bits, sketch=sketch, seed=1)
    x = rows(40, KV_HEADS * DIM, 2)
    codes, norms = encode_rows(codec, x)
    assert codes.shape == (40, code_columns(KV_HEADS, DIM, bits))
    assert norms.shape == (40, norm_columns(KV_HEADS, sketch))
    assert codes[0].numel() + 4 * norms[0].numel() == KV_HEADS * codec.row_bytes
    read = read_rows(codec, codes, norms).float()
    turned = read[..., :DIM]
    if codec.projection is not None:
        turned = turned + read[..., DIM:] @ codec.projection
    back = turned @ codec.rotation.t()
    decoded = codec.round_trip(x.float().view(-1, DIM)).float().view(40, KV_HEADS, DIM)
    # Narrowed in one space or in both: a few BF16 steps of 2^-9 of a row's size apart.
    assert float((back - decoded).square().mean() / decoded.square().mean()) < 3 * 2.0**-18


@pytest.mark.parametrize(("bits", "sketch"), FORMATS)
def test_attention_is_that_of_decoded_keys_and_values(bits: int, sketch: bool) -> None:
    """The CPU executor decodes before it attends: the difference is a few BF16 steps, far below the format's error."""
    keys, values = TurboQuant(DIM, bits, sketch=sketch, seed=3), TurboQuant(DIM, bits, seed=4)
    k, v = rows(256, KV_HEADS * DIM, 5), rows(256, KV_HEADS * DIM, 6)
    q = rows(2 * HEADS, DIM, 7).view(2, HEADS, DIM)
    positions, table = torch.tensor([199, 4]), torch.tensor([[1, 0], [0, 1]])
    found = turboquant_attention(q, (keys, *encode_rows(keys, k)), (values, *encode_rows(values, v)), positions, table)
    k_read, v_read = (codec.round_trip(x.float().view(-1, DIM)).view(256, -1) for codec, x in ((keys, k), (values, v)))
    decoded = paged_attention(q, k_read, v_read, positions, table, KV_HEADS)
    exact = paged_attention(q, k, v, positions, table, KV_HEADS)

    def error(a: Tensor, b: Tensor) -> float:
        return float((a.float() - b).square().sum() / b.square().sum())

    assert error(found, decoded) < 1e-4
    assert error(found, exact) > theoretical_mse(bits) / 2 > 20 * error(found, decoded)


def test_a_sketch_takes_the_bytes_of_the_format_without_it_and_one_more_number() -> None:
    plain, sketched = TurboQuant(DIM, 4), TurboQuant(DIM, 4, sketch=True)
    assert sketched.row_bytes == plain.row_bytes + 4
    codes, norms = encode_rows(sketched, rows(3, DIM, 8))
    assert codes.shape == encode_rows(plain, rows(3, DIM, 8))[0].shape
    # What a sign stands for: its length is QJL's estimate of the residual's, sqrt(pi / (2 d)) of it in each coordinate.
    share = norms[:, 1] / norms[:, 0] / (math.sqrt(math.pi / 2) / DIM)
    assert torch.allclose(share, torch.full_like(share, math.sqrt(theoretical_mse(3))), rtol=0.3)


def test_a_codec_comes_back_from_its_matrices() -> None:
    codec = TurboQuant(DIM, 3, sketch=True, seed=9)
    again = TurboQuant.from_matrices(codec.matrices, 3)
    assert codec.matrices.shape == (2 * DIM, DIM)
    x = rows(5, DIM, 10).float()
    assert torch.equal(again.round_trip(x), codec.round_trip(x))
    with pytest.raises(ContractError, match=r"found matrices of shape \[96, 64\]; expected 64 or 128 rows"):
        TurboQuant.from_matrices(codec.matrices[:96], 3)
