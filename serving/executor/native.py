"""The C++ decoder step behind a plain C interface, called through ctypes.

One call runs a whole step, from token ids to logits; the interpreter lock is released meanwhile. Before a library is
used, its structures' sizes are compared with the ones declared here, and its INT8 kernel is proved exact on full-range
data.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os

import torch
from torch import Tensor

from kernels.slabs import Slabs
from serving.errors import ExecutorError
from serving.executor.kv_codec import KvCodec
from serving.executor.native_build import NativeUnavailableError, build_library, resolve_instruction_set
from serving.executor.step import StepRows

logger = logging.getLogger(__name__)

MAX_ROWS = 512
"""Rows per call; longer steps are cut. Weights are read once per call, so more rows would gain little."""
LANES = 16
MAX_THREADS = 8
MESSAGE_BYTES = 512

_SHAPE_FIELDS = (
    "num_layers",
    "hidden",
    "intermediate",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "real_vocab",
    "num_pages",
    "max_rows",
    "threads",
    "key_levels",
    "value_levels",
)
_SLAB_FIELDS = (
    "embed_weight",
    "input_rms_weight",
    "wq",
    "wk",
    "wv",
    "wq_scale",
    "wk_scale",
    "wv_scale",
    "q_bias",
    "k_bias",
    "v_bias",
    "q_norm_weight",
    "k_norm_weight",
    "wo",
    "wo_scale",
    "post_rms_weight",
    "w_gate",
    "w_up",
    "w_gate_scale",
    "w_up_scale",
    "w_down",
    "w_down_scale",
    "final_norm_weight",
    "lm_head_weight",
    "rope_cos",
    "rope_sin",
)
_CODEC_FIELDS = (
    "kv_rotations",
    "key_projections",
    "key_centroids",
    "key_boundaries",
    "value_centroids",
    "value_boundaries",
)
_STEP_POINTERS = ("token_ids", "positions", "sequence", "tables", "logit_rows", "logits")


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in _SHAPE_FIELDS),
        ("rms_norm_eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
    )


class _Slabs(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in (*_SLAB_FIELDS, "k_cache", "v_cache", *_CODEC_FIELDS))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "table_stride", "logit_count")),
        *((name, ctypes.c_void_p) for name in _STEP_POINTERS),
    )


@functools.cache
def load_library(instruction_set: str | None = None) -> ctypes.CDLL:
    """Build if needed, load and prove the library for an instruction set (None: the best this CPU runs).

    Raises NativeUnavailableError when it cannot be built, loaded or trusted, ExecutorError for a name that cannot run
    here.
    """
    path = build_library(resolve_instruction_set(instruction_set))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}; remove it to have it rebuilt") from error
    pointer = ctypes.c_void_p
    library.decoder_int8_path.restype = ctypes.c_char_p
    library.decoder_create.restype = pointer
    library.decoder_create.argtypes = [pointer, pointer, ctypes.c_char_p, ctypes.c_int32]
    library.decoder_forward.argtypes = [pointer, pointer, ctypes.c_char_p, ctypes.c_int32]
    library.decoder_destroy.argtypes = [pointer]
    library.decoder_destroy.restype = None
    library.decoder_int8_matmul.argtypes = [pointer, pointer, *[ctypes.c_int32] * 3, pointer]
    sizes = (ctypes.c_int32 * 3)()
    library.decoder_struct_bytes(sizes)
    if list(sizes) != [ctypes.sizeof(_Shape), ctypes.sizeof(_Slabs), ctypes.sizeof(_Step)]:
        raise NativeUnavailableError(f"{path} has other structures than this version; remove it to have it rebuilt")
    _prove_exact(library)
    return library


def int8_matmul(library: ctypes.CDLL, codes: Tensor, weight: Tensor) -> Tensor:
    """INT8 `[rows, k]` x INT8 `[k, columns]` to INT32 through the packed kernel.

    `k` is a multiple of 16; codes lie in -127..127 and weights in -128..127.
    """
    rows, k = codes.shape
    columns = weight.shape[1]
    if k % LANES:
        raise ExecutorError(f"k is {k}; the packed kernels expect a multiple of {LANES}")
    codes, weight = codes.contiguous(), weight.contiguous()
    out = torch.empty(rows, columns, dtype=torch.int32)
    failed = library.decoder_int8_matmul(codes.data_ptr(), weight.data_ptr(), rows, k, columns, out.data_ptr())
    if failed:
        raise ExecutorError(f"INT8 product of {rows} x {k} x {columns} ran out of memory")
    return out


def default_threads() -> int:
    """Free cores now: those this process may use less the load average, at least 1 and at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    busy = os.getloadavg()[0]
    return max(1, min(MAX_THREADS, round(cores - busy)))


class NativeStep:
    """Runs steps in C++ on weights packed from the slabs; caches are BF16 `[layers * pages * 128, kv_size]`.

    Raises NativeUnavailableError when the model's widths are not multiples of 16 or the library cannot be had.
    """

    name = "native"

    def __init__(
        self,
        slabs: Slabs,
        k_cache: Tensor,
        v_cache: Tensor,
        threads: int,
        instruction_set: str | None = None,
        codec: KvCodec | None = None,
    ) -> None:
        config = slabs.config
        for field in ("hidden_size", "intermediate_size", "head_dim"):
            if getattr(config, field) % LANES:
                raise NativeUnavailableError(
                    f"{field} {getattr(config, field)} is not a multiple of {LANES}, which the native step needs"
                )
        self._library = load_library(instruction_set)
        self.instruction_set = self._library.decoder_int8_path().decode()
        # The library reads embedding, norms and RoPE tables in place, so the tensors live as long as the handle.
        tables: dict[str, Tensor | None] = {} if codec is None else codec.native_tables()
        self._kept = (slabs, k_cache, v_cache, tables)
        num_pages = k_cache.shape[0] // config.num_layers // 128
        shape = _Shape(
            config.num_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            slabs.real_vocab,
            num_pages,
            MAX_ROWS,
            threads,
            0 if codec is None else len(codec.keys[0].centroids),
            0 if codec is None else len(codec.values[0].centroids),
            config.rms_norm_eps,
            config.head_dim**-0.5,
        )
        pointers = _Slabs(
            *(slabs.tensors[name].data_ptr() if name in slabs.tensors else None for name in _SLAB_FIELDS),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            *(table.data_ptr() if (table := tables.get(name)) is not None else None for name in _CODEC_FIELDS),
        )
        self._message = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._handle = self._library.decoder_create(
            ctypes.addressof(shape), ctypes.addressof(pointers), self._message, MESSAGE_BYTES
        )
        if not self._handle:
            raise NativeUnavailableError(f"the native step could not be set up: {self._message.value.decode()}")

    def forward(self, rows: StepRows, logits: Tensor) -> None:
        """Run one step and write `logits` FP32 `[len(rows.logit_rows), real_vocab]` in place."""
        done = 0
        for part in rows.split(MAX_ROWS):
            count = part.logit_rows.shape[0]
            self._forward_part(part, logits[done : done + count])
            done += count

    def close(self) -> None:
        """Free the packed weights and end the threads; calling it again does nothing."""
        if self._handle:
            self._library.decoder_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _forward_part(self, rows: StepRows, logits: Tensor) -> None:
        step = _Step(
            rows.count,
            rows.tables.shape[1],
            rows.logit_rows.shape[0],
            rows.token_ids.data_ptr(),
            rows.positions.data_ptr(),
            rows.sequence.data_ptr(),
            rows.tables.data_ptr(),
            rows.logit_rows.data_ptr(),
            logits.data_ptr(),
        )
        if self._library.decoder_forward(self._handle, ctypes.addressof(step), self._message, MESSAGE_BYTES):
            raise ExecutorError(f"the native step failed: {self._message.value.decode()}")


def _prove_exact(library: ctypes.CDLL) -> None:
    """Compare one product of full-range data, the extremes included, with exact integers."""
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(-127, 128, (5, 96), generator=generator, dtype=torch.int8)
    weight = torch.randint(-128, 128, (96, 40), generator=generator, dtype=torch.int8)
    codes[0], codes[1], weight[:, 0], weight[:, 1] = 127, -127, -128, 127
    if not torch.equal(int8_matmul(library, codes, weight).long(), codes.long() @ weight.long()):
        path = library.decoder_int8_path().decode()
        raise NativeUnavailableError(f"the {path} INT8 kernel is not exact on this CPU; not using it")
