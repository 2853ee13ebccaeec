import pytest

from quantize.recipe import Gates
from tasks.gate import decide

GOOD = {"perplexity_ratio": 1.02, "mean_kl": 0.01, "top1_agreement": 0.97}


def names_failed(quality: dict[str, float], tpot_ms: float | None = None, **bounds: float) -> list[str]:
    return [gate.name for gate in decide(Gates(**bounds), quality, tpot_ms) if not gate.passed]


def test_good_figures_pass_every_gate() -> None:
    assert names_failed(GOOD) == []


@pytest.mark.parametrize(
    ("name", "value"), [("perplexity_ratio", 1.5), ("mean_kl", 0.5), ("top1_agreement", 0.2), ("mean_kl", float("nan"))]
)
def test_one_bad_figure_fails_its_gate_alone(name: str, value: float) -> None:
    assert names_failed({**GOOD, name: value}) == [name]


def test_a_figure_that_was_not_measured_does_not_pass() -> None:
    assert names_failed({"perplexity_ratio": 1.0}) == ["mean_kl", "top1_agreement"]


def test_tpot_is_gated_only_when_bounded() -> None:
    assert names_failed(GOOD, None) == []
    assert names_failed(GOOD, 20.0, max_tpot_ms=25.0) == []
    assert names_failed(GOOD, 30.0, max_tpot_ms=25.0) == ["tpot_ms"]
    assert names_failed(GOOD, None, max_tpot_ms=25.0) == ["tpot_ms"]
