"""Fixtures of the flow tests: a tiny source, loose gates, and a finished release of the one under the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.flows.support import LOOSE_GATES, release_arguments, run_json
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(LOOSE_GATES)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def released(source: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    store = tmp_path_factory.mktemp("released") / "store"
    return store, run_json(*release_arguments(source, store, recipe))
