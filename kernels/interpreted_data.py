"""Take the interpreter's results out of PyPTO 0.2.0, and its arguments with them.

The interpreter works on copies of the arguments, which stay in a list of PyPTO's. Before the cost model runs, PyPTO
appends the arguments once more, so that the model would read its table of arguments beyond the end: what stands there
decides whether the process survives (programs of 39 arguments did, one of 44 did not). So results are copied from the
list into the caller's tensors and the list is emptied. There is no interface to it: it is found by the layout of
0.2.0's classes (a vector of shared pointers to byte vectors), and every size is checked before anything is copied.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pypto import pypto_impl

from kernels.errors import ToolchainError

__all__ = ["take_results"]

_INTERFACE_LIBRARY = "libtile_fwk_interface.so"
_INSTANCE_SYMBOL = "_ZN3npu8tile_fwk11ProgramData11GetInstanceEv"
"""`ProgramData::GetInstance()`, whose first member is the list of arguments."""


class _Vector(ctypes.Structure):
    """A C++ vector: where its elements begin and end, and where its memory ends."""

    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p)]

    def size_bytes(self) -> int:
        return (self.end or 0) - (self.begin or 0)


class _SharedPointer(ctypes.Structure):
    _fields_ = [("pointee", ctypes.c_void_p), ("count", ctypes.c_void_p)]


def take_results(tensors: Sequence[Any]) -> None:
    """Copy what the interpreter left into the memory of `tensors`, which are PyPTO's, and forget it.

    Raises ToolchainError when PyPTO does not hold exactly these arguments where they are looked for.
    """
    library = ctypes.CDLL(_loaded_path(_INTERFACE_LIBRARY))
    instance = getattr(library, _INSTANCE_SYMBOL)
    instance.restype = ctypes.c_void_p
    held = _Vector.from_address(instance())
    count = held.size_bytes() // ctypes.sizeof(_SharedPointer)
    if count != len(tensors):
        raise ToolchainError(f"the interpreter holds {count} arguments, expected {len(tensors)}")
    pointers = (_SharedPointer * count).from_address(held.begin)
    results = [_Vector.from_address(pointer.pointee) for pointer in pointers]
    for at, (result, tensor) in enumerate(zip(results, tensors, strict=True)):
        expected = math.prod(tensor.ori_shape) * pypto_impl.BytesOf(tensor.dtype)
        if result.size_bytes() != expected:
            raise ToolchainError(
                f"the interpreter holds {result.size_bytes()} bytes of argument {at}, expected {expected}"
            )
    for result, tensor in zip(results, tensors, strict=True):
        ctypes.memmove(tensor.data_ptr, result.begin, result.size_bytes())
    pypto_impl.SetVerifyData([], [], [])


def _loaded_path(name: str) -> str:
    """The path of a library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("/" + name):
            return line.split(maxsplit=5)[-1]
    raise ToolchainError(f"pypto did not load {name}")
