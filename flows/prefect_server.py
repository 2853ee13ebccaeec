"""See to it that Prefect can be used before a flow starts, and say what is wrong when it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx

from flows.settings import Store, UsageError
from serving.files import locked

MIN_FREE_BYTES = 256 << 20
_REACH_TIMEOUT_S = 10.0
_UPGRADE_TIMEOUT_S = 300.0


def prepare_prefect(store: Store) -> str:
    """Check the server that `PREFECT_API_URL` names, or make the embedded server's database; says which is used.

    Raises UsageError when the server does not answer, the disk is all but full, or the database cannot be made. Call
    after `configure_environment`.
    """
    url = os.environ.get("PREFECT_API_URL")
    if url:
        _check_reachable(url)
        return f"server at {url}"
    free_bytes = shutil.disk_usage(store.root).free
    if free_bytes < MIN_FREE_BYTES:
        raise UsageError(
            f"{free_bytes >> 20} MiB are free at {store.root}, at least {MIN_FREE_BYTES >> 20} are needed to start; "
            "free some space (`pypto-deploy bundles prune --work`) or choose another --store"
        )
    home = Path(os.environ["PREFECT_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    # Two servers that start at once on no database would both make its tables, and one would fail.
    with locked(home / ".database.lock"):
        if not (home / ".database-made").exists():
            _make_database()
            (home / ".database-made").touch()
    return "embedded server"


def _check_reachable(url: str) -> None:
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=_REACH_TIMEOUT_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(
            f"PREFECT_API_URL is {url}, and nothing usable answers there ({type(error).__name__}: {error}); "
            "start that server, or unset the variable to use an embedded one"
        ) from error


def _make_database() -> None:
    command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_UPGRADE_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise UsageError(f"Prefect cannot make its database in {os.environ['PREFECT_HOME']}: {done.stderr[-1000:]}")
