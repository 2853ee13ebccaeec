"""Quantizing blocks of rows as bytes: the native kernel, and the torch code that it equals to the bit.

A kernel sees bytes: rows as they come from the file, room for codes and scales. `open_kernel` takes the native one
(built on first use, see `native_build`) and falls back to torch with a note: torch takes over a second to load, and
several passes over memory to do the same.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from quantize.errors import NativeBuildError
from quantize.native_build import INSTRUCTION_SETS, NativeLibrary, available_instruction_sets, build_library
from quantize.safetensors_header import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = NativeLibrary(Path(__file__).parent / "csrc", "quantize_rows.cpp", "quantize-rows", "the quantization kernel")
DTYPE_NUMBERS = {"BF16": 0, "F16": 1, "F32": 2}
KERNEL_SETS = {"avx512vnni", "avx2", "neon", "portable"}
"""Instruction sets worth a build of this kernel: the others differ only in instructions that it has no use for."""
logger = logging.getLogger(__name__)


class Buffer:
    """Bytes with an address: Python slices them, native code writes them."""

    def __init__(self, nbytes: int) -> None:
        memory = bytearray(max(1, nbytes))
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(frozen=True)
class Rounding:
    """How weights are rounded; see `Recipe`."""

    arithmetic: Literal["fp32", "compat"] = "fp32"
    clip: Literal["none", "mse"] = "none"


@dataclass
class RowSums:
    """Sums over the rows of a tensor so far: squares of weights and errors, and rows that became zero.

    `unclipped_noise` is the error without clipping; it is added up only when clipping is on.
    """

    signal: float = 0.0
    noise: float = 0.0
    unclipped_noise: float = 0.0
    vanished_rows: int = 0


@dataclass(frozen=True)
class Rows:
    """A block of whole rows: the bytes in `buffer` are `count` rows of `columns` elements, the first one `first`."""

    buffer: Buffer
    dtype: str
    first: int
    count: int
    columns: int


class RowKernel(Protocol):
    """What computes on blocks. `block_bytes` suit it best; a worker needs `bytes_per_block_byte` for each of them."""

    name: str
    block_bytes: int
    bytes_per_block_byte: float

    def quantize(self, rows: Rows, rounding: Rounding, codes: Buffer, scales: Buffer, sums: RowSums) -> int | None:
        """Write INT8 codes of the block, and scales at the rows' places among those of the whole tensor.

        Adds to `sums`. Returns the index within the block of the first NaN or infinity, or None.
        """

    def first_non_finite(self, buffer: Buffer, count: int, dtype: str) -> int | None:
        """Index of the first NaN or infinity among `count` elements, or None."""


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "codes", "scales")),
        *((name, ctypes.c_int64) for name in ("row_count", "columns")),
        *((name, ctypes.c_int32) for name in ("dtype", "compat", "clip", "reserved")),
        *((name, ctypes.c_double) for name in ("signal", "noise", "unclipped_noise")),
        *((name, ctypes.c_int64) for name in ("vanished_rows", "first_bad")),
    )


class NativeKernel:
    """The C++ kernel; the interpreter lock is released while it runs."""

    block_bytes = 2**19
    bytes_per_block_byte = 3.0

    def __init__(self, instruction_set: str | None = None) -> None:
        available = [name for name in available_instruction_sets() if name in KERNEL_SETS]
        self.name = available[0] if instruction_set is None else instruction_set
        if self.name not in available:
            raise NativeBuildError(f"instruction set {self.name!r} cannot run here; expected one of {available}")
        self._library = _load(self.name)

    def quantize(self, rows: Rows, rounding: Rounding, codes: Buffer, scales: Buffer, sums: RowSums) -> int | None:
        """See `RowKernel`."""
        job = _Job(
            rows=rows.buffer.address,
            codes=codes.address,
            scales=scales.address + rows.first * DTYPES[rows.dtype],
            row_count=rows.count,
            columns=rows.columns,
            dtype=DTYPE_NUMBERS[rows.dtype],
            compat=rounding.arithmetic == "compat",
            clip=rounding.clip == "mse",
            signal=sums.signal,
            noise=sums.noise,
            unclipped_noise=sums.unclipped_noise,
            vanished_rows=sums.vanished_rows,
        )
        self._library.quantize_rows(ctypes.byref(job))
        sums.signal, sums.noise, sums.unclipped_noise = job.signal, job.noise, job.unclipped_noise
        sums.vanished_rows = job.vanished_rows
        return None if job.first_bad < 0 else job.first_bad

    def first_non_finite(self, buffer: Buffer, count: int, dtype: str) -> int | None:
        """See `RowKernel`."""
        index: int = self._library.quantize_first_non_finite(buffer.address, count, DTYPE_NUMBERS[dtype])
        return None if index < 0 else index


@functools.cache
def _load(instruction_set: str) -> ctypes.CDLL:
    """Build if needed, load and prove the library; raises NativeBuildError."""
    path = build_library(LIBRARY, next(each for each in INSTRUCTION_SETS if each.name == instruction_set))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"{path} cannot be loaded: {error}; remove it to have it rebuilt") from error
    library.quantize_rows.argtypes = [ctypes.c_void_p]
    library.quantize_rows.restype = None
    library.quantize_first_non_finite.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    library.quantize_first_non_finite.restype = ctypes.c_int64
    if library.quantize_rows_struct_bytes() != ctypes.sizeof(_Job) or not _is_right(library):
        raise NativeBuildError(f"{path} does not compute what this version states; remove it to have it rebuilt")
    return library


def _is_right(library: ctypes.CDLL) -> bool:
    """Whether a row whose codes are known, ties to even among them, comes out as it must."""
    values = (127.0, -63.5, -62.5, 0.5, 1.5, -126.49, 3.49, 0.0, 2.0**-30) * 2
    expected = (127, -64, -62, 0, 2, -126, 3, 0, 0) * 2
    rows, codes, scales = Buffer(4 * len(values)), Buffer(len(values)), Buffer(4)
    struct.pack_into(f"<{len(values)}f", rows.view, 0, *values)
    job = _Job(rows.address, codes.address, scales.address, 1, len(values), DTYPE_NUMBERS["F32"])
    library.quantize_rows(ctypes.byref(job))
    found = struct.unpack_from(f"<{len(values)}b", codes.view)
    return found == expected and struct.unpack_from("<f", scales.view) == (1.0,) and job.first_bad == -1


class TorchKernel:
    """The same in torch, for machines without a C++ compiler."""

    name = "torch"
    block_bytes = 2**18
    bytes_per_block_byte = 26.0

    def quantize(self, rows: Rows, rounding: Rounding, codes: Buffer, scales: Buffer, sums: RowSums) -> int | None:
        """See `RowKernel`."""
        import torch

        from quantize.clipping import quantize_weight_clipped
        from quantize.numerics import quantize_weight
        from quantize.torch_dtypes import TORCH_DTYPES

        count = rows.count * rows.columns
        bad = self.first_non_finite(rows.buffer, count, rows.dtype)
        if bad is not None:
            return bad
        dtype = TORCH_DTYPES[rows.dtype]
        block = torch.frombuffer(rows.buffer.view, dtype=dtype, count=count).view(rows.count, rows.columns)
        exact = block.to(torch.float32)
        if rounding.clip == "mse":
            block_codes, found = quantize_weight_clipped(block)
            block_scales = found.scale
            noise = float(found.error.sum())
            sums.unclipped_noise += float(found.unclipped_error.sum())
        else:
            block_codes, block_scales = quantize_weight(block, rounding.arithmetic)
            noise = _energy(block_codes.to(torch.float32).mul_(block_scales.to(torch.float32)).sub_(exact))
        sums.signal += _energy(exact)
        sums.noise += noise
        sums.vanished_rows += int(block[~block_codes.any(dim=1)].any(dim=1).sum())
        torch.frombuffer(codes.view, dtype=torch.int8, count=count).copy_(block_codes.view(-1))
        offset = rows.first * DTYPES[rows.dtype]
        torch.frombuffer(scales.view, dtype=dtype, count=rows.count, offset=offset).copy_(block_scales.view(-1))
        return None

    def first_non_finite(self, buffer: Buffer, count: int, dtype: str) -> int | None:
        """See `RowKernel`. Either value makes a sum non-finite, so the search by element is rarely needed."""
        import torch

        from quantize.torch_dtypes import TORCH_DTYPES

        if count == 0:
            return None
        block = torch.frombuffer(buffer.view, dtype=TORCH_DTYPES[dtype], count=count)
        if math.isfinite(block.sum(dtype=torch.float32).item()):
            return None
        finite = torch.isfinite(block)
        return None if bool(finite.all()) else int((~finite).nonzero()[0])


def _energy(rows_fp32: Tensor) -> float:
    """The sum of squares of an FP32 matrix, in FP64 where squares could leave the range of FP32."""
    import torch

    energy = float(rows_fp32.square().sum(dim=1).sum(dtype=torch.float64))
    return energy if 1e-20 < energy < math.inf else float(rows_fp32.to(torch.float64).square().sum())


def open_kernel() -> RowKernel:
    """The native kernel, or torch's with a note in the log when it cannot be built; both give the same bits."""
    try:
        return NativeKernel()
    except NativeBuildError as error:
        logger.warning("quantizing with torch, several times slower: %s", error)
        return TorchKernel()


def element_value(element: memoryview, dtype: str) -> float:
    """The value of one little-endian element of dtype BF16, F16 or F32."""
    if dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + bytes(element))[0])
    return float(struct.unpack("<e" if dtype == "F16" else "<f", element)[0])
