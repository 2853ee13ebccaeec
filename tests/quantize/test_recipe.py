"""Recipes: unknown keys and entries that match nothing are errors; the digest covers what affects the weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quantize.errors import RecipeError
from quantize.model_config import load_model_config
from quantize.recipe import ModuleScheme, Recipe, ignored_modules
from quantize.recipe_file import load_recipe, parse_recipe


def test_no_file_and_empty_files_give_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("# nothing yet\n")
    assert (
        load_recipe(None) == load_recipe(path) == parse_recipe(None, "recipe") == parse_recipe({}, "recipe") == Recipe()
    )
    assert Recipe().ignore == ("lm_head",)
    assert (Recipe().gates.max_perplexity_ratio, Recipe().gates.min_top1_agreement) == (1.10, 0.85)


def test_yaml_json_and_a_mapping_read_alike(tmp_path: Path) -> None:
    content = {"arithmetic": "compat", "ignore": ["lm_head", "re:.*o_proj$"], "gates": {"max_mean_kl": 0.5}}
    (tmp_path / "r.json").write_text(json.dumps(content))
    (tmp_path / "r.yaml").write_text(
        "arithmetic: compat\nignore:\n- lm_head\n- re:.*o_proj$\ngates: {max_mean_kl: 0.5}\n"
    )
    parsed = parse_recipe(content, "here")
    assert parsed.arithmetic == "compat"
    assert load_recipe(tmp_path / "r.json") == load_recipe(tmp_path / "r.yaml") == parsed


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"arithmetik": "fp32"}, "arithmetik"),
        ({"arithmetic": "int4"}, "arithmetic"),
        ({"gates": {"max_perplexity_ratio": 0.9}}, "gates.max_perplexity_ratio"),
        ({"gates": {"max_mean_kl": float("nan")}}, "gates.max_mean_kl"),
        ({"gates": {"maximum": 1}}, "gates.maximum"),
        ({"gates": {"max_tpot_ms": 0}}, "gates.max_tpot_ms"),
        ({"gptq": {"damping": True}}, "gptq.damping"),
        ({"gptq": {"act_order": 1}}, "gptq.act_order"),
        ({"smoothing": {"strength": True}}, "smoothing.strength"),
        ({"smoothing": {"mappings": []}}, "smoothing.mappings"),
        ({"smoothing": 3}, "smoothing: expected a section"),
        ({"ignore": ["re:("]}, "not a valid pattern"),
        ({"ignore": "lm_head"}, "ignore"),
        ({"algorithm": "awq"}, "algorithm"),
        ({"algorithm": "gptq", "arithmetic": "compat"}, "use arithmetic fp32"),
        ({"clip": "mse", "arithmetic": "compat"}, "algorithm rtn and clip none"),
        ({"smoothing": {"rotate": True}}, "smoothing.rotate does nothing under algorithm rtn"),
        ({"smoothing": {"strength": 1.5}}, "smoothing.strength"),
        ({"smoothing": {"mappings": ["qkv", "qkv"]}}, "each mapping once"),
        ({"smoothing": {"mapping": ["qkv"]}}, "did you mean 'mappings'?"),
        ({"gptq": {"damping": 0}}, "gptq.damping"),
        ({"gptq": {"block_columns": 0}}, "gptq.block_columns"),
        ({"search": {"max_bf16_share": 1.01}}, "search.max_bf16_share"),
        ({"calibration": {"window_tokens": 1}}, "calibration.window_tokens"),
        ({"calibration": {"sed": 1}}, "did you mean 'seed'?"),
        ({"schemes": [{"targets": [], "scheme": "int8"}]}, "schemes.0.targets"),
        ({"schemes": [{"targets": ["re:("], "scheme": "bf16"}]}, "not a valid pattern"),
        ([1], "a list"),
        ("fp32", "a str"),
        ({1: 2}, "1"),
    ],
)
def test_bad_recipes_name_origin_and_key(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(RecipeError) as parsed:
        parse_recipe(content, "the parameter")
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RecipeError) as loaded:
        load_recipe(path)
    assert named in str(parsed.value)
    assert named in str(loaded.value)
    assert str(parsed.value).startswith("the parameter")
    assert str(loaded.value).startswith(str(path))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"a: [\xff")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(tmp_path / "bad.yaml")
    (tmp_path / "tag.yaml").write_text("a: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(tmp_path / "tag.yaml")


def test_the_digest_covers_what_affects_weights_and_nothing_else() -> None:
    base = Recipe().digest()
    assert parse_recipe({"gates": {"max_mean_kl": 0.5, "max_tpot_ms": 3}}, "x").digest() == base
    changes: list[dict[str, Any]] = [
        {"arithmetic": "compat"},
        {"down": "bf16"},
        {"ignore": []},
        {"algorithm": "gptq"},
        {"algorithm": "gptq", "gptq": {"act_order": False}},
        {"algorithm": "gptq", "smoothing": {"rotate": True}},
        {"algorithm": "gptq", "calibration": {"data": "text.txt"}},
        {"algorithm": "gptq", "calibration": {"held_out_tokens": 64}},
    ]
    assert len({base, *(parse_recipe(change, "x").digest() for change in changes)}) == 1 + len(changes)


def test_a_recipe_is_written_as_it_is_read(tmp_path: Path) -> None:
    recipe = parse_recipe(
        {"algorithm": "auto", "smoothing": {"strength": 0.5}, "search": {"max_bf16_share": 0.1}, "ignore": ["re:.*é$"]},
        "x",
    )
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert recipe.calibrates
    assert not Recipe().calibrates


def test_patterns_and_names_ignore_what_they_match(tiny_qwen3: Path) -> None:
    config = load_model_config(tiny_qwen3)
    assert ignored_modules(["re:.*down_proj$"], config) == [f"model.layers.{n}.mlp.down_proj" for n in (0, 1)]
    assert ignored_modules([], config) == []
    assert ignored_modules(Recipe(down="bf16").effective_ignore, config) == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]
    # A norm is a module, so naming one is no mistake; it is never quantized anyway.
    assert ignored_modules(["model.norm", "re:.*q_norm"], config) == []


def test_a_tied_head_is_always_ignored(tiny_llama: Path) -> None:
    assert ignored_modules([], load_model_config(tiny_llama)) == ["lm_head"]


@pytest.mark.parametrize(
    "entry", ["typo_proj", "down_proj", "re:layers", "model.layers.2.mlp.up_proj", "", "re:.*q_norm"]
)
def test_an_entry_that_matches_nothing_is_an_error(tiny_llama: Path, entry: str) -> None:
    with pytest.raises(RecipeError, match="match no module") as caught:
        ignored_modules(["lm_head", entry], load_model_config(tiny_llama))
    assert repr(entry) in str(caught.value)
    assert "'lm_head' match" not in str(caught.value)


def test_a_tied_head_cannot_be_asked_for(tiny_llama: Path) -> None:
    schemes = (ModuleScheme(targets=("lm_head",), scheme="int8"),)
    with pytest.raises(RecipeError, match="tie_word_embeddings"):
        ignored_modules([], load_model_config(tiny_llama), schemes)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 10_000, "not valid YAML"),
        (f"calibration: {{tokens: {'9' * 6000}}}", "not valid YAML"),
        (f"calibration: {{tokens: 0x{'f' * 60_000}}}", "a number of 240000 bits"),
        ("calibration: {data: 2024-13-45}", "month must be in 1..12"),
        ("algorithm: rtn\nalgorithm: gptq", "duplicate key 'algorithm'"),
        ("gptq: {damping: 0.1, damping: 0.2}", "duplicate key 'damping'"),
        ("# " + "x" * 2**20, "expected a recipe of at most"),
        ("ignore: 5", "ignore: expected a list (found 5)"),
        ("gptq: {damping: much}", "gptq.damping: expected a number (found 'much')"),
    ],
)
def test_hostile_and_sloppy_text_is_refused_in_words(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=re.escape(told)):
        load_recipe(path)


def test_a_recipe_is_a_file_with_an_end() -> None:
    with pytest.raises(RecipeError, match="not a file"):
        load_recipe(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("algorithm", "idle"),
    [
        ("rtn", ["gptq.damping", "search.max_kl_share", "calibration.tokens"]),
        ("smoothquant", ["gptq.damping", "search.max_kl_share"]),
        ("gptq", ["search.max_kl_share"]),
        ("auto", []),
    ],
)
def test_settings_that_an_algorithm_does_not_read_are_named(algorithm: str, idle: list[str]) -> None:
    sections = {"gptq": {"damping": 0.2}, "search": {"max_kl_share": 0.5}, "calibration": {"tokens": 4096}}
    assert parse_recipe({"algorithm": algorithm, **sections}, "x").idle_settings == idle
    assert parse_recipe({"algorithm": algorithm}, "x").idle_settings == []


def test_gptq_reads_of_smoothing_the_rotation_alone() -> None:
    recipe = parse_recipe({"algorithm": "gptq", "smoothing": {"rotate": True, "strength": 0.5}}, "x")
    assert recipe.idle_settings == ["smoothing.strength"]
