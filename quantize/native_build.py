"""Builds C++ sources into shared libraries on first use and keeps them in the user's cache.

One source, one build per instruction set: a library's file name is a digest of the sources, the compiler's version, the
flags and the machine, so a change of any of them is a new file and nothing is ever rebuilt in place. Two processes
that start together build once (a lock); a library is visible only when complete (rename); a damaged one is rebuilt.
This module knows nothing of what the libraries do.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quantize.errors import NativeBuildError

logger = logging.getLogger(__name__)

COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",  # a fused multiply-add rounds differently, and not every machine has one
    "-fno-math-errno",
    "-Wno-psabi",
)
COMPILE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class NativeLibrary:
    """What is compiled: every `.cpp` and `.hpp` of `folder` counts as its source, `main` is given to the compiler.

    `name` starts the library's file name, `label` is how messages call it.
    """

    folder: Path
    main: str
    name: str
    label: str


@dataclass(frozen=True)
class InstructionSet:
    """One way to build: CPU flags it needs (as Linux spells them) and compiler flags it is built with."""

    name: str
    machine: str
    needs: frozenset[str]
    flags: tuple[str, ...]


INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    InstructionSet(
        "avx512vnni",
        "x86_64",
        frozenset({"avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}),
        ("-mavx2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
    ),
    InstructionSet("avxvnni", "x86_64", frozenset({"avx2", "avx_vnni"}), ("-mavx2", "-mavxvnni")),
    InstructionSet("avx2", "x86_64", frozenset({"avx2"}), ("-mavx2",)),
    InstructionSet("neon", "aarch64", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",)),
    InstructionSet("portable", "", frozenset(), ()),
)
"""Best first. `portable` builds everywhere."""


def cpu_flags() -> frozenset[str]:
    """CPU feature names as the kernel reports them; empty where /proc/cpuinfo does not exist."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def available_instruction_sets() -> list[str]:
    """Names of the instruction sets that this CPU can run, best first."""
    flags, machine = cpu_flags(), platform.machine()
    return [each.name for each in INSTRUCTION_SETS if each.machine in ("", machine) and each.needs <= flags]


def default_cache_dir() -> Path:
    """Folder of everything built once per machine: `$PYPTO_DEPLOY_CACHE`, or the user's cache directory."""
    explicit = os.environ.get("PYPTO_DEPLOY_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pypto-deploy"


def build_library(library: NativeLibrary, instruction_set: InstructionSet) -> Path:
    """Return the built library for `instruction_set`, compiling it when the cache does not hold a sound one.

    Raises NativeBuildError when there is no compiler or it fails. A cache that cannot be written is replaced by a
    temporary folder, with a warning.
    """
    compiler = find_compiler()
    key = library_key(library, compiler, instruction_set)
    folder = _writable(default_cache_dir() / "native", library)
    path = folder / f"{library.name}-{instruction_set.name}-{key[:24]}.so"
    if _is_sound(path):
        return path
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.mkdtemp(prefix="pypto-deploy-native-"))
        logger.warning("the cache folder %s cannot be written; building %s in %s", path.parent, library.label, folder)
        path = folder / path.name
    with _lock(folder / f"{path.stem}.lock"):
        if not _is_sound(path):
            if path.exists():
                logger.warning("%s is damaged; rebuilding it", path)
            _compile(library, compiler, instruction_set, path)
    return path


def find_compiler() -> str:
    """Path of the C++ compiler: `$CXX`, else g++, else c++. Raises NativeBuildError when there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise NativeBuildError("no C++ compiler (g++) was found; install g++ 11 or later, or set CXX")


def library_key(library: NativeLibrary, compiler: str, instruction_set: InstructionSet) -> str:
    """SHA-256 over sources, compiler version, flags and machine."""
    digest = hashlib.sha256()
    for source in sorted(library.folder.iterdir()):
        if source.suffix in (".cpp", ".hpp"):
            digest.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    parts = (
        _compiler_version(compiler),
        platform.machine(),
        instruction_set.name,
        *COMMON_FLAGS,
        *instruction_set.flags,
    )
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()


@cache
def _compiler_version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeBuildError(f"{compiler} --version failed: {error}; install a working g++") from error


def _compile(library: NativeLibrary, compiler: str, instruction_set: InstructionSet, path: Path) -> None:
    logger.info("compiling %s for %s (once per machine)", library.label, instruction_set.name)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as build:
        target = Path(build) / path.name
        source = str(library.folder / library.main)
        command = [compiler, *COMMON_FLAGS, *instruction_set.flags, source, "-o", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise NativeBuildError(f"compiling {library.label} failed: {error}") from error
        if done.returncode:
            raise NativeBuildError(
                f"compiling {library.label} failed (exit {done.returncode}): {done.stderr.strip()[-2000:]}"
            )
        checksum = target.with_suffix(".sha256")
        checksum.write_text(hashlib.sha256(target.read_bytes()).hexdigest())
        checksum.replace(path.with_suffix(".sha256"))
        target.replace(path)


def _is_sound(path: Path) -> bool:
    """Whether the library is whole: loading a truncated one could kill the process."""
    try:
        expected = path.with_suffix(".sha256").read_text()
        return hashlib.sha256(path.read_bytes()).hexdigest() == expected
    except OSError:
        return False


def _writable(folder: Path, library: NativeLibrary) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="pypto-deploy-native-"))
        logger.warning(
            "the cache folder %s cannot be made (%s); building %s in %s", folder, error, library.label, temporary
        )
        return temporary
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
