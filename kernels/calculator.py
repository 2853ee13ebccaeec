"""The interpreter's calculator library, built once per toolchain and kept in the user's cache.

PyPTO executes graphs on the host through a C++ library that it builds with cmake in every process (about a minute).
Here it is built once, under a lock, into a folder named after the versions it depends on, and only loaded later.
This module knows nothing of programs.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from kernels.errors import ToolchainError
from kernels.runner_process import FULL_BYTES, SYSTEM_PATH
from quantize.native_build import default_cache_dir

__all__ = ["LIBRARY_NAME", "build_calculator", "default_cache_dir", "pypto_version", "system_cmake"]

LIBRARY_NAME = "libtile_fwk_calculator.so"
BUILD_TIMEOUT_S = 900.0
BUILD_BYTES = 64 << 20
"""Least room for a build and its library; a build that fills the disk up nevertheless goes on elsewhere too."""
_ELF_MAGIC = b"\x7fELF"
_BUILD_COMMAND = "import kernels.calculator as c, sys; c._build_in_process(sys.argv[1])"

logger = logging.getLogger(__name__)


def pypto_version() -> str:
    """Version of the installed `pypto` distribution; raises ToolchainError when there is none."""
    try:
        return metadata.version("pypto")
    except metadata.PackageNotFoundError:
        raise ToolchainError("pypto is not installed; install it with `pip install pypto==0.2.0`") from None


def system_cmake() -> Path | None:
    """First cmake on PATH that is a native executable (PyPTO ignores the script of the `cmake` wheel), or None."""
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]:
        found = shutil.which("cmake", path=folder) if folder else None
        if found is None:
            continue
        with Path(found).resolve().open("rb") as stream:
            if stream.read(len(_ELF_MAGIC)) == _ELF_MAGIC:
                return Path(found)
    return None


def build_calculator(cache_dir: Path | None = None) -> Path:
    """Return the calculator library for this interpreter, building it on first use (about a minute).

    Concurrent callers wait for one build; a cache folder that is read-only or on a full disk makes it go to a folder
    under the temporary directory instead. Raises ToolchainError without cmake, when the build fails, and without a C++
    compiler even when the library is there: PyPTO calls one for every program.
    """
    _require_compiler()
    for root in (cache_dir or default_cache_dir(), Path(tempfile.gettempdir()) / f"pypto-deploy-{os.getuid()}"):
        folder = root / "calculator" / _toolchain_key()
        library = folder / LIBRARY_NAME
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.stat().st_uid not in (os.getuid(), 0):
                raise PermissionError(f"{root} belongs to another user, whose library is not loaded")
            if library.is_file():
                return library
            folder.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(folder).free) < BUILD_BYTES:
                raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB free, of {BUILD_BYTES / 1e6:.0f} MB for its build")
            lock = (folder / "lock").open("w")
        except OSError as error:
            logger.warning("cannot keep the calculator library in %s (%s)", folder, error)
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.is_file() and not _built_unless_full(folder):
                continue
            return library
    raise ToolchainError(
        f"no folder for the calculator library that can be written and has {BUILD_BYTES / 1e6:.0f} MB of room; "
        "set PYPTO_DEPLOY_CACHE to one"
    )


def _require_compiler() -> None:
    """Raise ToolchainError unless `g++` is where programs are compiled: the system's folders, then PATH."""
    if shutil.which("g++", path=os.pathsep.join([SYSTEM_PATH, os.environ.get("PATH", "")])) is None:
        raise ToolchainError("no C++ compiler on PATH; install one (Debian: `apt install g++`)")


def _toolchain_key() -> str:
    """Name of the build: everything its binary interface depends on."""
    parts = (pypto_version(), metadata.version("torch"), platform.machine(), sys.implementation.cache_tag or "")
    return f"pypto-{parts[0]}-torch-{parts[1]}-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def _built_unless_full(folder: Path) -> bool:
    """Build in `folder`; False, with a warning, when that fails and has filled the disk up."""
    try:
        _build(folder)
    except (OSError, ToolchainError) as error:
        if shutil.disk_usage(folder).free >= FULL_BYTES:
            raise
        logger.warning("cannot build the calculator library in %s, whose disk is full (%s)", folder, error)
        return False
    return True


def _build(folder: Path) -> None:
    """Build in a subprocess (importing pypto here would bind its log folders) and publish by rename."""
    if system_cmake() is None:
        raise ToolchainError("no native cmake on PATH; install it (Debian: `apt install cmake g++`)")
    for abandoned in folder.glob("build-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    logger.info("building the interpreter's calculator library (about a minute, once)")
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        environment = {
            **os.environ,
            "PYPTO_HOME": f"{work}/home",
            "ASCEND_WORK_PATH": f"{work}/log",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        command = [sys.executable, "-c", _BUILD_COMMAND, work]
        try:
            done = subprocess.run(
                command, env=environment, cwd=work, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ToolchainError(f"the calculator build did not end within {BUILD_TIMEOUT_S:.0f} s") from None
        built = Path(work) / LIBRARY_NAME
        if done.returncode != 0 or not built.is_file():
            raise ToolchainError(f"the calculator build failed:\n{(done.stderr or done.stdout)[-2000:]}")
        built.replace(folder / LIBRARY_NAME)


def _build_in_process(work: str) -> None:
    """Run PyPTO's own cmake project for the calculator; leaves the library in `work`."""
    import torch
    from pypto._utils import BuildOnlineManager

    context = BuildOnlineManager._CMakeContext
    project = context.CompileContext(
        src_dir=Path(BuildOnlineManager().pkg_lib_dir) / "calculator", tmp_dir=Path(work) / "cmake"
    )
    project.build_job_num = max(1, min(4, os.cpu_count() or 1))
    project.cfg_cmd_ext = (
        f"-DPY3_MOD_TORCH_VERSION={torch.__version__} "
        f"-DPY3_MOD_TORCH_ROOT_PATH={Path(torch.__file__).parent} "
        f"-DPY3_MOD_TORCH_C_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    )
    installed = context().compile(ctx=project) / "lib" / LIBRARY_NAME
    shutil.copyfile(installed, Path(work) / LIBRARY_NAME)
