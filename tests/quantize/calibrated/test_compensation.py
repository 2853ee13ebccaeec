"""Weights make up for rounded inputs where tokens come again, and are left alone where only noise was lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantize.calibrated.compensation import Judges, compensated, judging_windows
from quantize.calibrated.decoder import fake_quantize
from quantize.calibrated.gptq import GptqFactor, InputMoments, factor_hessian

COLUMNS = 96


def factor_of(inputs: Tensor, *, compensate: bool = True) -> GptqFactor:
    moments = InputMoments(inputs.shape[1], compensate=compensate)
    moments.add(inputs, fake_quantize(inputs), torch.ones(len(inputs)))
    return factor_hessian(moments, 0.01, True, "layer 0, qkv")


def judges_of(inputs: Tensor) -> Judges:
    judges = Judges([])
    for part in inputs.split(50):
        judges.add(part, fake_quantize(part), torch.ones(len(part)))
    return judges


def output_error(inputs: Tensor, exact: Tensor, found: Tensor) -> float:
    return float((inputs @ exact.T - fake_quantize(inputs) @ found.T).square().sum())


def noisy(tokens: int, seed: int) -> Tensor:
    """Inputs of which rounding loses nothing that others could tell."""
    return torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(seed))


def recurring(tokens: int, seed: int) -> Tensor:
    """Among others, one large token that comes again and again, almost the same."""
    inputs = noisy(tokens, seed)
    inputs[::4] = 40 * noisy(1, 99) + 0.01 * inputs[::4]
    return inputs


def weight() -> Tensor:
    return torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(11)) / 10


def test_what_comes_again_is_made_up_for_on_tokens_not_seen() -> None:
    compensation = factor_of(recurring(1024, 1)).compensation
    assert compensation is not None
    found, share = compensated(weight(), compensation, judges_of(recurring(256, 2)))
    assert share > 0.8
    unseen = recurring(512, 3)
    assert output_error(unseen, weight(), found) < 0.5 * output_error(unseen, weight(), weight())


def test_noise_is_not_learnt() -> None:
    """All of the change would do harm on other tokens; the judges let none of it through."""
    compensation = factor_of(noisy(1024, 1)).compensation
    assert compensation is not None
    found, share = compensated(weight(), compensation, judges_of(noisy(256, 2)))
    assert share == 0
    assert torch.equal(found, weight())
    unseen, whole = noisy(512, 3), weight() + weight() @ compensation
    assert output_error(unseen, weight(), whole) > 1.02 * output_error(unseen, weight(), weight())


def test_the_share_is_that_of_least_error() -> None:
    compensation = factor_of(recurring(64, 1)).compensation
    assert compensation is not None
    inputs = recurring(256, 2)
    found, share = compensated(weight(), compensation, judges_of(inputs))
    assert 0 < share <= 1
    best = output_error(inputs, weight(), found)
    for other in (share - 0.05, share - 0.3):
        assert output_error(inputs, weight(), weight() + other * weight() @ compensation) > best


def test_exact_inputs_need_none() -> None:
    inputs = noisy(512, 1)
    moments = InputMoments(COLUMNS)
    moments.add(inputs, inputs, torch.ones(512))
    compensation = factor_hessian(moments, 0.01, True, "x").compensation
    assert compensation is not None
    assert not compensation.any()


def test_it_can_be_left_out() -> None:
    assert factor_of(noisy(256, 1), compensate=False).compensation is None


@pytest.mark.parametrize(
    ("windows", "tokens", "judges"), [(7, 512, 0), (8, 512, 1), (32, 512, 4), (8, 32, 0), (64, 32, 8)]
)
def test_one_window_in_eight_judges_unless_they_have_too_few_tokens(windows: int, tokens: int, judges: int) -> None:
    assert int(judging_windows(windows, tokens).sum()) == judges
