"""`auto`: where it stops, what it spends, what it keeps, and that nobody has to do it twice."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from quantize.calibrated.candidates import CandidateFolder
from quantize.calibrated.search import candidates, noisiest_sites, quantize_auto
from quantize.checkpoint import CheckpointReader, payload_digest
from quantize.errors import CalibrationError, CheckpointError
from quantize.pipeline import quantize
from quantize.recipe import Recipe
from quantize.recipe_file import load_recipe
from quantize.rtn import QuantizeResult
from tests.quantize.calibrated.support import large_channels, make_small_llama, recipe, run_kills

NEVER = {"max_kl_share": 1e-9}
TITLES = ["rtn", "rtn, clipped", "smoothquant", "smoothquant+gptq", "smoothquant+gptq, rotated"]


class Maker:
    """Makes candidates as the pipeline does, and notes which."""

    def __init__(self, stop_at: int = 99) -> None:
        self.made: list[Recipe] = []
        self._stop_at = stop_at

    def __call__(self, source: Path, out: Path, chosen: Recipe) -> QuantizeResult:
        if len(self.made) == self._stop_at:
            raise KeyboardInterrupt
        self.made.append(chosen)
        return quantize(source, out, chosen)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with large channels, where smoothing pays."""
    return large_channels(make_small_llama(tmp_path_factory.mktemp("search") / "source"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_stops_at_the_first_that_meets_the_bounds(source: Path, tmp_path: Path) -> None:
    make = Maker()
    bounds = {"max_kl_share": 0.6, "max_perplexity_share": 1e6}
    steps: list[tuple[int, int]] = []
    result = quantize_auto(source, tmp_path / "out", recipe("auto", search=bounds), make, lambda *at: steps.append(at))
    assert [row["recipe"] for row in result.search] == TITLES[:3]
    assert [row["met"] for row in result.search] == [False, False, True]
    assert [row["chosen"] for row in result.search] == [False, False, True]
    assert result.search[0]["kl_share"] == 1
    assert result.search[2]["kl_share"] < 0.6
    assert steps == [(1, 5), (2, 5), (3, 5), (5, 5)]
    assert names(tmp_path) == ["out"]
    assert all(chosen.calibration.held_out_tokens == 128 for chosen in make.made)
    assert load_recipe(tmp_path / "out" / "recipe.yaml") == make.made[2]
    table = json.loads((tmp_path / "out" / "search.json").read_text())["rows"]
    assert table == [{key: value for key, value in row.items() if key != "seconds"} for row in result.search]
    assert result.digest == payload_digest(tmp_path / "out")


def test_plain_rounding_is_enough_when_the_bounds_say_so(source: Path, tmp_path: Path) -> None:
    bounds = {"max_kl_share": 1.0, "max_perplexity_share": 1.0}
    result = quantize(source, tmp_path / "out", recipe("auto", search=bounds))
    assert [row["recipe"] for row in result.search] == ["rtn"]
    again = quantize(source, tmp_path / "again", recipe("auto", search=bounds))
    assert again.digest == result.digest
    with CheckpointReader(tmp_path / "out") as left:
        quantize(source, tmp_path / "rtn", recipe("rtn"))
        with CheckpointReader(tmp_path / "rtn") as right:
            assert all(torch.equal(left.tensor(name), right.tensor(name)) for name in right.infos)


def test_bounds_that_nothing_meets_give_the_best_and_say_so(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = quantize(source, tmp_path / "out", recipe("auto", search=NEVER))
    assert [row["recipe"] for row in result.search] == TITLES
    assert not any(row["met"] for row in result.search)
    best = min(result.search, key=lambda row: row["mean_kl"])
    assert best["chosen"]
    assert "no recipe left at most" in caplog.text
    assert best["recipe"] in caplog.text
    assert all(row["bf16_share"] == 0 for row in result.search)
    assert load_recipe(tmp_path / "out" / "recipe.yaml").algorithm != "auto"


@pytest.mark.parametrize("reader", ["any", "vllm"])
def test_bf16_goes_to_the_noisiest_sites_within_the_budget(reader: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    chosen = recipe("auto", reader=reader, search={**NEVER, "max_bf16_share": 0.4})
    make = Maker()
    result = quantize_auto(tiny_qwen3, tmp_path / "out", chosen, make)
    spent = result.search[5:]
    assert len(spent) == 2
    assert 0 < spent[0]["bf16_share"] <= 0.2 < spent[1]["bf16_share"] <= 0.4
    best = min(result.search[:5], key=lambda row: row["mean_kl"])
    assert [row["recipe"].startswith(best["recipe"]) for row in spent] == [True, True]
    assert spent[1]["mean_kl"] < 0.9 * best["mean_kl"]
    assert spent[1]["chosen"]
    kept = make.made[-1].schemes[-1].targets
    assert {name.rsplit(".", 1)[1] for name in kept} <= {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    groups = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]
    for layer in range(2):
        found = {name.rsplit(".", 1)[1] for name in kept if f"layers.{layer}." in name}
        assert all(found.isdisjoint(group) or found >= group for group in groups)


def test_sites_are_ranked_by_their_noise() -> None:
    def layer(number: int, **sqnr: float) -> dict[str, Any]:
        linears = [{"name": "a", "site": "qkv"}, {"name": "b", "site": "qkv"}, {"name": "c", "site": "o"}]
        sites = [{"site": site, "sqnr_after_db": value} for site, value in sqnr.items()]
        return {"layer": number, "sites": sites, "linears": linears}

    ranked = noisiest_sites([layer(0, qkv=30.0, o=50.0), layer(1, qkv=40.0)])
    assert ranked == [
        ["model.layers.0.a", "model.layers.0.b"],
        ["model.layers.1.a", "model.layers.1.b"],
        ["model.layers.0.c"],
    ]


def test_candidates_differ_in_what_they_are_named_for() -> None:
    chosen = recipe("auto", gptq={"damping": 0.05}, schemes=[{"targets": ["re:.*o_proj"], "scheme": "bf16"}])
    tried = candidates(chosen)
    assert [title for title, _ in tried] == TITLES
    for _, variant in tried:
        assert (variant.gptq, variant.schemes, variant.calibration) == (chosen.gptq, chosen.schemes, chosen.calibration)
        assert Recipe.model_validate(variant.model_dump()) == variant
    assert len({variant.digest() for _, variant in tried}) == 5


def test_an_interrupted_search_goes_on_behind_what_is_finished(source: Path, tmp_path: Path) -> None:
    chosen = recipe("auto", search=NEVER)
    whole = quantize_auto(source, tmp_path / "whole", chosen, Maker())
    with pytest.raises(KeyboardInterrupt):
        quantize_auto(source, tmp_path / "out", chosen, Maker(stop_at=3))
    held = [path.name for path in (tmp_path / ".out.search").iterdir() if path.is_dir()]
    assert len(held) == 1  # the best one so far
    rest = Maker()
    again = quantize_auto(source, tmp_path / "out", chosen, rest)
    assert [made.algorithm for made in rest.made] == ["smoothquant+gptq"] * 2
    assert again.digest == whole.digest == payload_digest(tmp_path / "out")
    assert names(tmp_path) == ["out", "whole"]


def test_a_damaged_best_candidate_is_made_again(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = recipe("auto", search=NEVER)
    with pytest.raises(KeyboardInterrupt):
        quantize_auto(source, tmp_path / "out", chosen, Maker(stop_at=4))
    (held,) = [path for path in (tmp_path / ".out.search").iterdir() if path.is_dir()]
    shard = held / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    result = quantize_auto(source, tmp_path / "out", chosen, Maker())
    assert result.digest == quantize(source, tmp_path / "whole", chosen).digest == payload_digest(tmp_path / "out")


def test_other_text_under_the_same_path_starts_anew(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the end of the way and on the other hand a thing in it. " * 100)
    chosen = recipe("auto", search=NEVER, calibration={"data": str(text)})
    with pytest.raises(KeyboardInterrupt):
        quantize_auto(source, tmp_path / "out", chosen, Maker(stop_at=3))
    text.write_text("another thing is seen and heard in the morning of that day. " * 100)
    make = Maker()
    quantize_auto(source, tmp_path / "out", chosen, make)
    assert len(make.made) == 5


def test_kills_leave_the_digest_as_it_is(source: Path, tmp_path: Path) -> None:
    answer = run_kills(source, tmp_path, recipe("auto", search=NEVER), [40, 5, 60, 44, 80, 3])
    assert answer["ends"][:4] == [-9] * 4
    assert answer["ends"][-1] == 0
    assert answer["out"] == answer["whole"]
    assert answer["left"] == ["out", "whole"]


def test_one_search_at_a_time(source: Path, tmp_path: Path) -> None:
    with (
        CandidateFolder(tmp_path / "out", "key"),
        pytest.raises(CheckpointError, match="another process is writing it"),
    ):
        quantize(source, tmp_path / "out", recipe("auto"))
    assert names(tmp_path) == []


def test_refusals_come_first_and_leave_nothing(source: Path, tmp_path: Path) -> None:
    """Of what only later candidates would meet, too."""
    for keys, words in (
        ({"ignore": []}, "leaves the LM head as it is"),
        ({"calibration": {"window_tokens": 4096}}, "context has 2048"),
    ):
        make = Maker()
        with pytest.raises(CalibrationError, match=words):
            quantize_auto(source, tmp_path / "out", recipe("auto", **keys), make)
        assert make.made == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        quantize(source, tmp_path / "full", recipe("auto"))
    assert names(tmp_path) == ["full"]


def test_ids_beyond_the_vocabulary_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    small = make_small_llama(tmp_path / "source", vocab_size=100)
    with pytest.raises(CalibrationError, match="the model has 100 rows"):
        quantize(small, tmp_path / "out", recipe("auto"))
    assert names(tmp_path) == ["source"]
