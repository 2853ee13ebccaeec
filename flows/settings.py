"""Settings of a run and the environment that Prefect and MLflow see.

Importing this module is cheap; call `configure_environment` before the first import of Prefect. Telemetry of both is
off unless the user has set their variables otherwise.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

STORE_VARIABLE = "PYPTO_DEPLOY_STORE"
DEFAULT_STORE = ".pypto-deploy"
PLATFORMS = ("cpu", "sim", "a2a3")
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class UsageError(Exception):
    """The command line, a flow parameter or the environment is not what it must be; exit code 2."""


@dataclass(frozen=True)
class Store:
    """The folder that holds bundles, step outputs, and the embedded Prefect and MLflow databases."""

    root: Path

    @property
    def work(self) -> Path:
        """Step outputs, addressed by content; safe to delete between runs."""
        return self.root / "work"


def resolve_store(store: str | None) -> Store:
    """The store named by an option, else by `PYPTO_DEPLOY_STORE`, else `.pypto-deploy` in the current folder."""
    root = Path(store or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE).expanduser().absolute()
    if root.exists() and not root.is_dir():
        raise UsageError(f"store {root} is a file; expected a folder (it is created when absent)")
    return Store(root)


def configure_environment(store: Store, *, quiet: bool = True) -> None:
    """Set what Prefect, MLflow and the Hugging Face libraries read from the environment; the user's settings win."""
    defaults = {
        "PREFECT_HOME": str(store.root / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # The default of 20 s is too short for the first start on a small machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if quiet:
        defaults |= {
            # At ERROR Prefect prints the traceback of an error that the command line tells in a sentence.
            "PREFECT_LOGGING_LEVEL": "CRITICAL",
            "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
            "TRANSFORMERS_VERBOSITY": "error",
            "MLFLOW_LOGGING_LEVEL": "ERROR",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def check_environment() -> None:
    """Refuse to run where an import would be wrong: beside Hugging Face's `kernels`, or on an unsupported Python."""
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        raise UsageError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} found, 3.11 or 3.12 expected "
            "(pypto 0.2.0 has no wheel for others); make a virtual environment with one of them"
        )
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise UsageError(
        f"the distribution 'kernels' {version} (Hugging Face's) is installed and would shadow pypto-deploy's own "
        "`kernels` package; run `pip uninstall kernels` or use another virtual environment"
    )


def check_name(name: str) -> str:
    """A release name that is safe as a model name and a folder name; raises `UsageError` naming what was found."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"name {name!r}: expected 1 to 100 letters, digits, dots, dashes or underscores, "
            "starting with a letter or digit; choose one with --name"
        )
    return name
