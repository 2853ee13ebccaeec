"""SHA-256 of two tensors at a time where the CPU can, and hashlib's everywhere else; the digests are the same.

Hashing is the largest part of what plain rounding computes. One hash is a chain of dependent rounds that leaves part of
a core idle; `csrc/sha256_pair.cpp` fills the gaps with the rounds of another.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from pathlib import Path
from typing import Protocol

from quantize.errors import NativeBuildError
from quantize.native_build import INSTRUCTION_SETS, NativeLibrary, build_library

LIBRARY = NativeLibrary(Path(__file__).parent / "csrc", "sha256_pair.cpp", "sha256-pair", "the hash of two streams")
logger = logging.getLogger(__name__)


class Hash(Protocol):
    """What `hashlib.sha256()` offers of what is needed here."""

    def update(self, data: memoryview, /) -> None:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""


class _Context(ctypes.Structure):
    _fields_ = (("state", ctypes.c_uint32 * 8), ("total_bytes", ctypes.c_uint64), ("rest", ctypes.c_uint8 * 64))


def _address(data: memoryview) -> ctypes.c_char:
    return ctypes.c_char.from_buffer(data)


class PairedHash:
    """SHA-256 that can be updated together with another (`update_both`); pieces must be writable memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._context = _Context()
        library.sha256_start(ctypes.byref(self._context))

    def update(self, data: memoryview, /) -> None:
        """Take the next bytes."""
        if data.nbytes:
            self._library.sha256_update(ctypes.byref(self._context), ctypes.byref(_address(data)), data.nbytes)

    def update_with(self, data: memoryview, other: PairedHash, other_data: memoryview) -> None:
        """Take the next bytes of both."""
        self._library.sha256_update_pair(
            ctypes.byref(self._context),
            ctypes.byref(_address(data)),
            data.nbytes,
            ctypes.byref(other._context),
            ctypes.byref(_address(other_data)),
            other_data.nbytes,
        )

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""
        context = _Context.from_buffer_copy(self._context)
        digest = (ctypes.c_uint8 * 32)()
        self._library.sha256_finish(ctypes.byref(context), digest)
        return bytes(digest).hex()


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library, built if needed; None where the CPU lacks the instructions or nothing can be built."""
    try:
        path = build_library(LIBRARY, next(each for each in INSTRUCTION_SETS if each.name == "portable"))
        library = ctypes.CDLL(str(path))
    except (NativeBuildError, OSError) as error:
        logger.info("hashing one tensor at a time: %s", error)
        return None
    if not library.sha256_pair_available():
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    library.sha256_start.argtypes = [pointer]
    library.sha256_update.argtypes = [pointer, pointer, size]
    library.sha256_update_pair.argtypes = [pointer, pointer, size] * 2
    library.sha256_finish.argtypes = [pointer, pointer]
    probe = PairedHash(library)
    probe.update(memoryview(bytearray(range(200))))
    if probe.hexdigest() != hashlib.sha256(bytes(range(200))).hexdigest():
        logger.warning("%s does not compute SHA-256; remove it to have it rebuilt", path)
        return None
    return library


def new_hash() -> Hash:
    """A SHA-256 that can be paired where this machine has the means, else hashlib's."""
    library = _library()
    return hashlib.sha256() if library is None else PairedHash(library)


def update_both(first: Hash, first_data: memoryview, second: Hash, second_data: memoryview) -> None:
    """Update two hashes, together when both can."""
    if isinstance(first, PairedHash) and isinstance(second, PairedHash) and first_data.nbytes and second_data.nbytes:
        first.update_with(first_data, second, second_data)
    else:
        first.update(first_data)
        second.update(second_data)
