"""GPTQ's codes leave less output error than rounding, whatever the blocks; bad Hessians are raised out loud."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from quantize.calibrated.gptq import GptqFactor, InputMoments, factor_hessian, gptq_codes
from quantize.errors import CalibrationError
from quantize.numerics import weight_codes, weight_scales


def correlated_inputs(tokens: int = 512, columns: int = 96, seed: int = 0) -> Tensor:
    """Inputs that share a few directions, of sizes that differ a hundredfold."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
    inputs = mixed + 0.3 * torch.randn(tokens, columns, generator=generator)
    return inputs * torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]


def moments_of(inputs: Tensor, weights: Tensor | None = None) -> InputMoments:
    """Of inputs that rounding leaves as they are."""
    moments = InputMoments(inputs.shape[1])
    weights = torch.ones(len(inputs)) if weights is None else weights
    for start in range(0, len(inputs), 100):
        part = inputs[start : start + 100]
        moments.add(part, part, weights[start : start + 100])
    return moments


def linear(rows: int = 64, columns: int = 96) -> tuple[Tensor, Tensor]:
    """A weight and its scales."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(11)) / 10
    return weight, weight_scales(weight.abs().amax(dim=1, keepdim=True))


def output_error(inputs: Tensor, weight: Tensor, codes: Tensor, scale: Tensor) -> float:
    return float((inputs @ (codes.float() * scale - weight).T).square().sum())


@pytest.mark.parametrize("act_order", [False, True])
def test_the_output_error_is_well_below_rounding_s(act_order: bool) -> None:
    inputs, (weight, scale) = correlated_inputs(), linear()
    factor = factor_hessian(moments_of(inputs), 0.01, act_order, "layer 0, qkv")
    codes = gptq_codes(weight, scale, factor, 32)
    assert codes.dtype == torch.int8
    assert int(codes.abs().max()) <= 127
    rounded = output_error(inputs, weight, weight_codes(weight, scale), scale)
    assert output_error(inputs, weight, codes, scale) < 0.35 * rounded
    assert (factor.damping, factor.attempts) == (0.01, 1)
    # On inputs that were not seen, of the same kind.
    unseen = inputs[torch.randperm(512, generator=torch.Generator().manual_seed(1))[:256]] * -1.5
    assert output_error(unseen, weight, codes, scale) < 0.5 * output_error(
        unseen, weight, weight_codes(weight, scale), scale
    )


def test_tokens_count_by_their_weight() -> None:
    """Two kinds of tokens: the kind that counts gets the smaller error."""
    left, right = correlated_inputs(seed=1), correlated_inputs(seed=2)
    weight, scale = linear()
    errors = []
    for share in (0.01, 0.99):
        shares = torch.cat([torch.full((512,), share), torch.full((512,), 1 - share)])
        factor = factor_hessian(moments_of(torch.cat([left, right]), shares), 0.01, True, "x")
        errors.append(output_error(left, weight, gptq_codes(weight, scale, factor, 32), scale))
    assert errors[1] < 0.9 * errors[0]


def test_without_correlation_it_rounds() -> None:
    """A diagonal Hessian leaves nothing to make up for."""
    moments = InputMoments(96)
    moments.hessian += torch.diag(torch.linspace(1, 5, 96, dtype=torch.float64))
    weight, scale = linear()
    for act_order in (False, True):
        factor = factor_hessian(moments, 0.01, act_order, "x")
        assert torch.equal(gptq_codes(weight, scale, factor, 32), weight_codes(weight, scale))


def test_the_order_is_by_size_of_inputs() -> None:
    inputs = correlated_inputs()
    moments = moments_of(inputs)
    assert factor_hessian(moments, 0.01, False, "x").order.tolist() == list(range(96))
    by_size = factor_hessian(moments, 0.01, True, "x").order
    assert torch.equal(by_size, inputs.square().sum(dim=0).argsort(descending=True))


def test_the_factor_inverts_the_damped_hessian() -> None:
    moments = moments_of(correlated_inputs())
    factor = factor_hessian(moments, 0.05, True, "x")
    hessian = moments.hessian + 0.05 * moments.hessian.diagonal().mean() * torch.eye(96, dtype=torch.float64)
    root = factor.inverse_root.double()
    assert torch.equal(root, root.triu())
    product = (root.T @ root) @ hessian[factor.order][:, factor.order]
    assert torch.allclose(product, torch.eye(96, dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("block_columns", [1, 7, 95, 96, 128])
def test_blocks_only_bundle(block_columns: int) -> None:
    """Sums run in another order, so a code at a rounding tie may differ, and those that come after it."""
    weight, scale = linear()
    factor = factor_hessian(moments_of(correlated_inputs()), 0.01, True, "x")
    expected = gptq_codes(weight, scale, factor, 16)
    assert float((gptq_codes(weight, scale, factor, block_columns) != expected).float().mean()) < 0.01


def test_codes_stay_in_range_when_errors_pile_up() -> None:
    """One column so correlated with the rest that what it must make up for is far outside its range."""
    weight, scale = linear()
    root = torch.eye(96)
    root[:-1, -1] = 50.0
    codes = gptq_codes(weight, scale, GptqFactor(torch.arange(96), root, None, 0.01, 1), 32)
    assert int(codes.min()) == -127
    assert int(codes.max()) == 127


@pytest.mark.parametrize("kind", ["fewer tokens than columns", "duplicated inputs"])
def test_a_singular_hessian_gets_more_damping_and_says_so(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    inputs = correlated_inputs(tokens=40) if kind.startswith("fewer") else correlated_inputs()[:, [0] * 48 + [1] * 48]
    with caplog.at_level(logging.WARNING):
        factor = factor_hessian(moments_of(inputs), 1e-20, True, "layer 3, down")
    assert factor.attempts > 1
    assert factor.damping == pytest.approx(1e-20 * 10 ** (factor.attempts - 1))
    assert len(caplog.records) == factor.attempts - 1
    assert all("layer 3, down: the Hessian is not positive definite" in record.message for record in caplog.records)
    weight, scale = linear()
    codes = gptq_codes(weight, scale, factor_hessian(moments_of(inputs), 0.01, True, "x"), 32)
    assert output_error(inputs, weight, codes, scale) < output_error(inputs, weight, weight_codes(weight, scale), scale)


def test_inputs_that_are_always_zero_are_rounded() -> None:
    inputs = correlated_inputs()
    inputs[:, [2, 50]] = 0
    factor = factor_hessian(moments_of(inputs), 0.01, True, "x")
    assert factor.attempts == 1
    weight, scale = linear()
    codes = gptq_codes(weight, scale, factor, 32)
    assert torch.equal(codes[:, [2, 50]], weight_codes(weight, scale)[:, [2, 50]])


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "are all zero"), (float("nan"), "are not finite"), (float("inf"), "are not finite")]
)
def test_useless_activations_are_refused_by_name(value: float, words: str) -> None:
    inputs = correlated_inputs() if value else torch.zeros(512, 96)
    if value:
        inputs[7, 9] = value
    with pytest.raises(CalibrationError, match=f"layer 3, o: the calibration activations {words}"):
        factor_hessian(moments_of(inputs), 0.01, True, "layer 3, o")


def test_a_hessian_that_no_damping_helps_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    moments = InputMoments(4)
    moments.hessian += 1e3 * torch.tensor([[0.0, 1], [1, 0]], dtype=torch.float64).kron(torch.ones(2, 2))
    moments.hessian += torch.eye(4, dtype=torch.float64)
    with pytest.raises(CalibrationError, match=r"layer 1, down: .* cannot be inverted even with damping 10"):
        factor_hessian(moments, 0.01, False, "layer 1, down")
    assert len(caplog.records) == 4
