"""Sampling rules, each checked against an independent statement of the distribution."""

from __future__ import annotations

import math

import pytest
import torch

from serving.errors import RequestError
from serving.sampler import Sampler
from serving.sampling_params import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -5.0])


def draws(params: SamplingParams, count: int = 3000) -> dict[int, float]:
    sampler = Sampler(params)
    drawn = [sampler.sample(LOGITS).token_id for _ in range(count)]
    return {token: drawn.count(token) / count for token in sorted(set(drawn))}


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    assert Sampler(SamplingParams(temperature=0.0)).sample(LOGITS).token_id == 1


def test_frequencies_follow_the_softmax() -> None:
    temperature = 1.5
    expected = torch.softmax(LOGITS / temperature, dim=0)
    for token, frequency in draws(SamplingParams(seed=1, temperature=temperature)).items():
        assert frequency == pytest.approx(float(expected[token]), abs=0.03)


def test_the_smallest_temperature_is_all_but_greedy() -> None:
    logits = torch.tensor([-2.0, 30.0, -40.0])
    assert Sampler(SamplingParams(seed=1, temperature=1e-320)).sample(logits).token_id == 1


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(draws(SamplingParams(seed=1, top_k=2))) == {1, 3}
    assert set(draws(SamplingParams(seed=1, top_k=1))) == {1}
    # Probabilities are about .41 .41 .15 .03 .00: the shortest prefix reaching 0.5 has two tokens, 0.9 three.
    assert set(draws(SamplingParams(seed=1, top_p=0.5))) == {1, 3}
    assert set(draws(SamplingParams(seed=1, top_p=0.9))) == {1, 2, 3}
    assert set(draws(SamplingParams(seed=1, top_p=1e-9))) == {1}


def test_seed_decides_the_stream_and_no_seed_varies() -> None:
    def stream(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=2.0))
        return [sampler.sample(LOGITS).token_id for _ in range(60)]

    assert stream(5) == stream(5)
    assert stream(5) != stream(6)
    assert stream(None) != stream(None)


def test_logprobs_are_of_the_models_own_distribution() -> None:
    sampled = Sampler(SamplingParams(temperature=0.0, logprobs=2)).sample(LOGITS)
    assert sampled.logprobs is not None
    total = sum(math.exp(float(value)) for value in LOGITS)
    assert sampled.logprobs.logprob == pytest.approx(3.0 - math.log(total))
    assert [token for token, _ in sampled.logprobs.top] == [1, 3]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_values_out_of_range_name_their_field(values: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert caught.value.param == field
