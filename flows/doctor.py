"""What this machine can do, checked by looking, and what to install for the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
from packaging.requirements import Requirement

from flows.settings import Store
from serving.bench import describe_machine
from tasks.tracking import Tracking

CPU_FLAGS = ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")
DISTRIBUTION = "pypto-deploy"
MIN_FREE_BYTES = 4 << 30
_HTTP_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Check:
    """One finding: `ok` (there), `absent` (optional and not there) or `missing` (needed), and what to do."""

    name: str
    status: str
    found: str
    advice: str = ""


def examine(store: Store) -> list[Check]:
    """Look at Python, tools, packages, the CPU, the NPU, Prefect, MLflow and the disk."""
    return [
        _python(),
        *(_package(name, wanted) for name, wanted in pinned_packages().items()),
        _foreign_kernels(),
        _cpu(),
        _tool("g++", "the CPU executor's fast path and PyPTO's calculator; without it serving uses the torch path"),
        _cmake(),
        _npu(),
        _service(
            "Prefect server", os.environ.get("PREFECT_API_URL"), "/health", "an embedded server is started as needed"
        ),
        _mlflow(store),
        _disk(store),
    ]


def pinned_packages() -> dict[str, str]:
    """Packages that `pyproject.toml` pins exactly, since internals of that version are relied on."""
    requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    return {
        requirement.name: next(iter(requirement.specifier)).version
        for requirement in requirements
        if requirement.marker is None and str(requirement.specifier).startswith("==")
    }


def _python() -> Check:
    version = platform.python_version()
    supported = (3, 11) <= sys.version_info[:2] < (3, 13) and sys.platform == "linux"
    advice = "" if supported else "use CPython 3.11 or 3.12 on Linux (x86-64 or aarch64): pypto has no other wheels"
    return Check(
        "python", "ok" if supported else "missing", f"{version} on {sys.platform} {platform.machine()}", advice
    )


def _package(name: str, wanted: str) -> Check:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", "not installed", f"pip install {name}=={wanted}")
    if version.split("+")[0] != wanted:
        return Check(
            name, "missing", version, f"pip install {name}=={wanted} (internals of this version are relied on)"
        )
    return Check(name, "ok", version)


def _foreign_kernels() -> Check:
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return Check("no foreign kernels", "ok", "Hugging Face's `kernels` is not installed")
    return Check("no foreign kernels", "missing", f"kernels {version}", "pip uninstall kernels")


def _cpu() -> Check:
    cpuinfo = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace") if Path("/proc/cpuinfo").exists() else ""
    )
    fields = [line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line]
    flags = next((value.split() for key, value in fields if key.strip() in {"flags", "Features"}), [])
    features = [flag for flag in CPU_FLAGS if flag in flags]
    machine = describe_machine()
    return Check(
        "cpu", "ok", f"{machine['cpu']}, {machine['cores']} cores, {', '.join(features) or 'no INT8 vector features'}"
    )


def _tool(name: str, purpose: str) -> Check:
    path = shutil.which(name)
    if path is None:
        return Check(name, "missing", "not on PATH", f"apt-get install {name}: {purpose}")
    return Check(name, "ok", path)


def _cmake() -> Check:
    path = shutil.which("cmake")
    advice = "apt-get install cmake: PyPTO builds its verification library with it (pip's cmake script does not count)"
    if path is None:
        return Check("cmake", "missing", "not on PATH", advice)
    with Path(path).open("rb") as stream:
        if stream.read(4) != b"\x7fELF" and not Path("/usr/bin/cmake").exists():
            return Check("cmake", "missing", f"{path} is a script", advice)
    return Check("cmake", "ok", path)


def _npu() -> Check:
    home = os.environ.get("ASCEND_HOME_PATH")
    has_torch_npu = importlib.util.find_spec("torch_npu") is not None
    if home and has_torch_npu:
        return Check("npu", "ok", f"CANN at {home}, torch_npu {importlib.metadata.version('torch_npu')}")
    found = f"ASCEND_HOME_PATH {'set' if home else 'not set'}, torch_npu {'found' if has_torch_npu else 'not found'}"
    return Check(
        "npu",
        "absent",
        found,
        "for --platform a2a3: CANN 8.5 (source set_env.sh) and the torch_npu of this torch; "
        "without them programs are verified and simulated, and the CPU serves",
    )


def _service(name: str, url: str | None, path: str, embedded: str) -> Check:
    if not url:
        return Check(name.lower(), "ok", embedded)
    try:
        httpx.get(url.rstrip("/") + path, timeout=_HTTP_TIMEOUT_S).raise_for_status()
    except httpx.HTTPError as error:
        return Check(name.lower(), "missing", f"{url}: {error}", f"start it, or unset its variable: {embedded}")
    return Check(name.lower(), "ok", f"reachable at {url}")


def _mlflow(store: Store) -> Check:
    tracking = Tracking.of_store(store.root)
    if tracking.uri.startswith("http"):
        return _service("MLflow", tracking.uri, "/health", "an embedded SQLite database in the store is used")
    return Check("mlflow store", "ok", tracking.uri)


def _disk(store: Store) -> Check:
    existing = next(parent for parent in (store.root, *store.root.parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing).free
    found = f"{free_bytes / 2**30:.1f} GiB free at {existing}"
    if free_bytes < MIN_FREE_BYTES:
        return Check("disk", "missing", found, "free at least 4 GiB, about three times the checkpoint's size")
    if not os.access(existing, os.W_OK):
        return Check("disk", "missing", f"{existing} is not writable", "choose another --store")
    return Check("disk", "ok", found)
