"""Rotations are orthogonal, and change nothing of what a model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantize.calibrated.decoder import Layer
from quantize.calibrated.rotation import (
    O_PROJ,
    hadamard,
    make_rotation,
    orthogonal_matrix,
    rotate_embedding,
    rotate_head,
    rotate_layer,
)
from quantize.checkpoint import CheckpointReader
from tests.quantize.calibrated.support import FAMILIES, IDS, distance, family_source, source_logits

ORDERS = (1, 2, 4, 8, 12, 20, 24, 28, 36, 44, 48, 64, 128, 576, 896, 1536)
"""Sizes of heads and residual streams among them: 576 of SmolLM2, 896 of Qwen2.5-0.5B, 1536 of its 1.5B."""


@pytest.mark.parametrize("order", ORDERS)
def test_hadamard_matrices_are_built_exactly(order: int) -> None:
    matrix = hadamard(order)
    assert matrix is not None
    assert set(matrix.unique().tolist()) <= {-1.0, 1.0}
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


def test_a_residual_stream_of_5120_has_one() -> None:
    """Of Qwen3-14B: twenty times a power of two; the product of the whole would take too long here."""
    matrix = hadamard(5120)
    assert matrix is not None
    rows = matrix[::257]
    assert torch.equal(rows @ matrix.T, 5120 * torch.eye(5120, dtype=torch.float64)[::257])


@pytest.mark.parametrize("order", [3, 6, 10, 18, 52 * 3, 92])
def test_other_orders_fall_to_blocks(order: int) -> None:
    matrix = orthogonal_matrix(order, 3)
    assert torch.allclose(matrix @ matrix.T, torch.eye(order, dtype=torch.float64), atol=1e-12)
    if hadamard(order) is None:
        block = order & -order
        assert int((matrix != 0).sum(dim=1).max()) == block


def test_the_seed_decides(tiny_qwen3: Path) -> None:
    with CheckpointReader(tiny_qwen3) as reader:
        one, same, other = (make_rotation(reader.config, seed) for seed in (0, 0, 1))
    assert torch.equal(one.residual, same.residual)
    assert not torch.equal(one.residual, other.residual)
    assert one.head.shape == (32, 32)
    spike = torch.zeros(64)
    spike[5] = 8.0
    assert torch.allclose((spike @ one.residual).abs(), torch.ones(64))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotated_model_computes_the_same(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with CheckpointReader(family_source(family, tmp_path, request)) as reader:
        rotation = make_rotation(reader.config, 7)
        plain = source_logits(reader, IDS)
        turned = source_logits(
            reader,
            IDS,
            lambda number, layer: rotate_layer(layer, reader.config, rotation),
            embedding=lambda rows: rotate_embedding(rows, rotation),
            head=lambda rows, norm: rotate_head(rows, norm, rotation),
        )
    assert distance(turned, plain) < 2e-5


@pytest.mark.parametrize("mistake", ["the head's norm", "a layer's norm", "the undoing of v", "the bias of v"])
def test_a_step_left_out_shows(mistake: str, tiny_qwen2: Path) -> None:
    """Sensitivity of the test above."""
    with CheckpointReader(tiny_qwen2) as reader:
        config, rotation = reader.config, make_rotation(reader.config, 7)

        def wrong(number: int, layer: Layer) -> None:
            if mistake == "a layer's norm" and number == 1:
                layer.norms["post_attention_layernorm"].fill_(1.0)
            bias = layer.biases["self_attn.v_proj"].clone()
            rotate_layer(layer, config, rotation)
            if mistake == "the undoing of v" and number == 1:
                heads = layer.weights[O_PROJ].view(config.hidden_size, config.num_heads, config.head_dim)
                layer.weights[O_PROJ] = (heads @ rotation.head.T).reshape(config.hidden_size, config.q_size)
            if mistake == "the bias of v":
                layer.biases["self_attn.v_proj"] = bias

        turned = source_logits(
            reader,
            IDS,
            wrong,
            embedding=lambda rows: rotate_embedding(rows, rotation),
            head=lambda rows, norm: rotate_head(
                rows, torch.ones_like(norm) if mistake == "the head's norm" else norm, rotation
            ),
        )
        assert distance(turned, source_logits(reader, IDS)) > 1e-3
