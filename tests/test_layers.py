"""A layer imports only itself and those before it, and `kernels/__init__.py` stays empty."""

import ast
import importlib.metadata
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["quantize", "kernels", "serving", "tasks", "flows"]
FORBIDDEN_LIBRARIES = {
    "quantize": {"prefect", "mlflow", "pypto", "fastapi"},
    "kernels": {"prefect", "mlflow", "fastapi"},
    "serving": {"prefect", "mlflow"},
}


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_those_before_it(layer: str) -> None:
    later = set(LAYERS[LAYERS.index(layer) + 1 :]) | FORBIDDEN_LIBRARIES.get(layer, set())
    modules = list((ROOT / layer).rglob("*.py"))
    assert modules
    wrong = {str(path): bad for path in modules if (bad := imported_packages(path) & later)}
    assert not wrong


def test_the_check_sees_an_import_of_a_later_layer(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from flows.release import release\n    return release\n")
    assert imported_packages(path) == {"flows"}


def test_kernels_is_empty_and_the_version_stays_where_transformers_ignores_it() -> None:
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""
    assert Version(importlib.metadata.version("pypto-deploy")) < Version("0.18")
