"""The text that a program is made from: its modules and what they import, as digests.

A cached check is valid as long as this text is: the digest follows `import` statements inside our packages, so that a
change in a shared block or in the golden reaches every program that uses it, and no other. File times do not count.
"""

from __future__ import annotations

import ast
import hashlib
import threading
from pathlib import Path

import kernels.errors
from kernels.errors import ToolchainError

PACKAGES = ("kernels", "quantize")
_PARSING = threading.Lock()
"""Python 3.11 loses count of its depth when two threads parse at once (SystemError)."""
_ROOT = Path(kernels.errors.__file__).parent.parent


def closure_digest(*modules: str) -> str:
    """SHA-256 over the source text of `modules` and everything of ours that they import, in name order."""
    texts: dict[str, bytes] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        if name in texts:
            continue
        texts[name] = module_path(name).read_bytes()
        pending.extend(imported_modules(texts[name]) - texts.keys())
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(f"{name}\0{hashlib.sha256(texts[name]).hexdigest()}\n".encode())
    return digest.hexdigest()


def imported_modules(text: bytes) -> set[str]:
    """Names of our modules that the source `text` imports, at any depth of nesting."""
    names: set[str] = set()
    with _PARSING:
        tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            candidates = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            candidates = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        names.update(name for name in candidates if name.split(".")[0] in PACKAGES and _is_module(name))
    return names


def module_path(name: str) -> Path:
    """Source file of one of our modules; raises ToolchainError when there is none."""
    path = _source(name)
    if path is None:
        raise ToolchainError(f"module {name} has no source file under {_ROOT}")
    return path


def _is_module(name: str) -> bool:
    return _source(name) is not None


def _source(name: str) -> Path | None:
    """The file of a module or package, found without importing it: a kernel imports pypto, which sets up logging."""
    place = _ROOT.joinpath(*name.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
