"""Fixtures of the serving tests: tiny bundles shared by a session, stores made for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.bundle import BundleParts
from serving.store import BundleStore
from tests.serving.bundles import make_parts


@pytest.fixture(scope="session")
def tiny_parts(tmp_path_factory: pytest.TempPathFactory) -> list[BundleParts]:
    """Parts of four tiny models with different weights; copy before changing any file."""
    folder = tmp_path_factory.mktemp("parts")
    return [make_parts(folder / str(seed), seed) for seed in range(4)]


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    """An empty store."""
    return BundleStore(tmp_path / "store")
