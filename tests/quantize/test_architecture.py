"""Names of tensors and modules, and how lists of them are told, hostile ones included."""

from __future__ import annotations

import pytest

from quantize.architecture import by_layer, expected_tensors, is_optional, layer_of, linear_modules
from quantize.checkpoint import CheckpointReader
from quantize.errors import CheckpointError, printable
from quantize.families import FAMILIES
from quantize.model_config import load_model_config


@pytest.mark.parametrize("family", [*FAMILIES, "llama3"])
def test_expected_tensors_are_those_transformers_saves(family: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(f"tiny_{family}")
    config = load_model_config(directory)
    with CheckpointReader(directory) as reader:
        assert {name: info.shape for name, info in reader.infos.items()} == expected_tensors(config)
    named = set(expected_tensors(config)) | {"lm_head.weight"}
    assert {module + ".weight" for module in linear_modules(config)} <= named
    assert is_optional("lm_head.weight", config) == config.tie_word_embeddings


def test_every_family_has_a_fixture(request: pytest.FixtureRequest) -> None:
    for family in FAMILIES:
        assert (request.getfixturevalue(f"tiny_{family}") / "config.json").is_file()


def test_names_are_grouped_by_layer_in_order_and_cut() -> None:
    names = ["model.norm.weight", "model.layers.10.b", "model.layers.2.b", "model.layers.2.a", "lm_head.weight"]
    assert by_layer(names) == ["lm_head.weight, model.norm.weight", "layer 2: a, b", "layer 10: b"]
    assert by_layer([]) == []
    many = by_layer(f"model.layers.0.x{number:03}" for number in range(50))
    assert many[0].endswith("x019 and 30 more")


def test_a_layer_number_beyond_any_integer_is_no_layer() -> None:
    name = "model.layers." + "9" * 5000 + ".mlp.up_proj.weight"
    assert layer_of(name) is None
    assert len(by_layer([name])[0]) < 200
    assert layer_of("model.layers.٣.mlp") is None


def test_messages_hold_no_control_characters_and_are_cut() -> None:
    error = CheckpointError("a\x1b[31m", ["b\nc\u202e\ud800", *("x" for _ in range(500))])
    assert str(error) == printable(str(error))
    lines = str(error).split("\n")
    assert lines[0] == "a\\x1b[31m"
    assert lines[1] == "  - b\\nc\\u202e\\ud800"
    assert lines[-1] == "  ... and 301 more"
    assert len(error.problems) == 501
