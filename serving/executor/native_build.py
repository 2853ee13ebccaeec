"""The C++ decoder step as a library to build: `quantize.native_build` with this folder's sources and errors."""

from __future__ import annotations

from pathlib import Path

from quantize import native_build
from quantize.errors import NativeBuildError
from quantize.native_build import (
    COMMON_FLAGS,
    INSTRUCTION_SETS,
    InstructionSet,
    NativeLibrary,
    available_instruction_sets,
)
from serving.errors import ExecutorError

__all__ = [
    "COMMON_FLAGS",
    "INSTRUCTION_SETS",
    "SOURCE_DIR",
    "InstructionSet",
    "NativeUnavailableError",
    "available_instruction_sets",
    "build_library",
    "find_compiler",
    "library_key",
    "resolve_instruction_set",
]

SOURCE_DIR = Path(__file__).parent / "csrc"


class NativeUnavailableError(ExecutorError):
    """The native step cannot be built or loaded on this machine; the message says why."""


def _library() -> NativeLibrary:
    return NativeLibrary(SOURCE_DIR, "decoder.cpp", "decoder", "the native step")


def resolve_instruction_set(name: str | None) -> InstructionSet:
    """The named instruction set, or the best available for None; raises ExecutorError for one that cannot run here."""
    available = available_instruction_sets()
    wanted = available[0] if name is None else name
    if wanted not in available:
        raise ExecutorError(f"instruction set {wanted!r} cannot run here; expected one of {', '.join(available)}")
    return next(each for each in INSTRUCTION_SETS if each.name == wanted)


def build_library(instruction_set: InstructionSet) -> Path:
    """Return the decoder's library, compiling it at need; raises NativeUnavailableError when that cannot be done."""
    try:
        return native_build.build_library(_library(), instruction_set)
    except NativeBuildError as error:
        raise NativeUnavailableError(str(error)) from error


def find_compiler() -> str:
    """Path of the C++ compiler; raises NativeUnavailableError when there is none."""
    try:
        return native_build.find_compiler()
    except NativeBuildError as error:
        raise NativeUnavailableError(str(error)) from error


def library_key(compiler: str, instruction_set: InstructionSet) -> str:
    """SHA-256 over the decoder's sources, compiler version, flags and machine."""
    return native_build.library_key(_library(), compiler, instruction_set)
