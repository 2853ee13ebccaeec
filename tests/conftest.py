"""Fixtures shared by all test folders: tiny checkpoints made once per test session (read-only for the tests)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import LLAMA3_ROPE, make_tiny_llama, make_tiny_mistral, make_tiny_qwen2, make_tiny_qwen3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a file belongs to one worker, and a long one at the end would run alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    whole = {item.path for item in items if item.get_closest_marker("e2e")}
    items.sort(key=lambda item: (item.path not in whole, item.path not in slow))


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 checkpoint directory; copy it before changing anything."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint directory with tied embeddings; copy it before changing anything."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 checkpoint directory with QKV biases; copy it before changing anything."""
    return make_tiny_qwen2(tmp_path_factory.mktemp("tiny") / "qwen2")


@pytest.fixture(scope="session")
def tiny_llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the rotary scaling of Llama 3.1 and an LM head of its own; copy it before changing anything."""
    directory = tmp_path_factory.mktemp("tiny") / "llama3"
    return make_tiny_llama(directory, rope_parameters=dict(LLAMA3_ROPE), tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tiny_mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral checkpoint directory without a sliding window; copy it before changing anything."""
    return make_tiny_mistral(tmp_path_factory.mktemp("tiny") / "mistral")
