"""What a program is: its arguments as data, its golden, its tolerances, and the check of arguments before a call.

PyPTO does not check a call: a tensor of the wrong dtype or shape is reinterpreted byte by byte, and one that is read
under one name while it is written under another holds whichever came first. So every call goes through
`check_arguments`. This module knows nothing of pypto.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kernels.errors import ProgramError

__all__ = [
    "Argument",
    "Comparison",
    "Program",
    "ProgramSpec",
    "check_arguments",
    "check_rows",
    "compare_outputs",
    "make_outputs",
]

Direction = Literal["in", "out", "inout", "scratch"]


@dataclass(frozen=True)
class Argument:
    """One tensor argument: a dimension of None is dynamic (read from the tensor at run time)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    direction: Direction = "in"

    def shape_text(self) -> str:
        """The shape as text, dynamic dimensions as `*`."""
        return "[" + ", ".join("*" if size is None else str(size) for size in self.shape) + "]"


@dataclass(frozen=True)
class ProgramSpec:
    """Base of the frozen specifications that programs are built from; every field is a JSON value."""

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """An output compared with its golden: largest absolute difference, the tolerance in words, and the verdict."""

    name: str
    max_abs_diff: float
    tolerance: str
    ok: bool


class Program(ABC):
    """A program at one shape. Subclasses say what it takes, what it should compute, and how close it must come."""

    name: ClassVar[str]
    kernel_module: ClassVar[str]
    """Module whose `build(program, options)` returns the jit-compiled kernel; imported only in the subprocess."""

    def __init__(self, spec: ProgramSpec) -> None:
        self.spec = spec

    @abstractmethod
    def arguments(self) -> tuple[Argument, ...]:
        """The tensor arguments, in call order."""

    @abstractmethod
    def sample_inputs(self, seed: int) -> dict[str, Tensor]:
        """Random but realistic values for every argument (outputs and scratch zeroed), by name."""

    @abstractmethod
    def shape_inputs(self) -> dict[str, Tensor]:
        """Arguments of the right shape whose values matter to control flow only; the rest is zeros, never touched."""

    @abstractmethod
    def units(self) -> int:
        """Loop bodies that one call executes: the verifier must report every one of them in every pass."""

    @abstractmethod
    def golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What every "out" and "inout" argument should hold after the call; `tensors` are left as they are."""

    @abstractmethod
    def hbm_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes that one call must move between HBM and the cores: weights, cache rows read and written, rows."""

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027 - optional hook
        """Raise ProgramError on values that the kernel would misread silently (slots, pages, lengths)."""

    def check_tiles(self) -> None:  # noqa: B027 - optional hook
        """Raise ProgramError, naming site and rule, when a tile of the kernel cannot be laid out at this shape."""

    def dynamic_rows(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Rows of the "out" or "scratch" argument `name`, where they are dynamic: by default the first input's."""
        return tensors[self.arguments()[0].name].shape[0]

    def tolerances(self) -> dict[str, str]:
        """For each output that need not be exact: the tolerance, a key of `TOLERANCES`."""
        return {}


def check_arguments(program: Program, tensors: Mapping[str, Tensor], *, values: bool = True) -> list[Tensor]:
    """Check `tensors` against the program's arguments and return them in call order.

    Raises ProgramError naming every mismatch: missing or unknown names, dtype, shape, memory layout, memory shared with
    an argument that is written, then (unless `values` is False: the caller checked them before they went to a device)
    values.
    """
    arguments = program.arguments()
    known = {argument.name for argument in arguments}
    problems = [f"unknown argument `{name}`" for name in tensors if name not in known]
    for argument in arguments:
        tensor = tensors.get(argument.name)
        if tensor is None:
            problems.append(f"`{argument.name}` is missing")
            continue
        if not isinstance(tensor, Tensor):
            problems.append(f"`{argument.name}` is a {type(tensor).__name__}, expected a tensor")
            continue
        if tensor.is_meta or tensor.layout != torch.strided:
            problems.append(
                f"`{argument.name}` is a {tensor.layout} tensor on {tensor.device}, expected one with memory"
            )
            continue
        if tensor.dtype != argument.dtype:
            problems.append(f"`{argument.name}` is {tensor.dtype}, expected {argument.dtype}")
        if tensor.dim() != len(argument.shape) or any(
            want is not None and have != want for have, want in zip(tensor.shape, argument.shape, strict=True)
        ):
            problems.append(f"`{argument.name}` has shape {list(tensor.shape)}, expected {argument.shape_text()}")
        elif tensor.numel() == 0:
            problems.append(f"`{argument.name}` is empty")
        if not tensor.is_contiguous():
            problems.append(f"`{argument.name}` is not contiguous; pass `.contiguous()`")
    if not problems:
        problems = _shared_memory(arguments, tensors)
    if problems:
        raise ProgramError(f"{program.name} cannot be called: " + "; ".join(problems))
    if values:
        program.check_values(tensors)
    return [tensors[argument.name] for argument in arguments]


def _shared_memory(arguments: Sequence[Argument], tensors: Mapping[str, Tensor]) -> list[str]:
    """Pairs of contiguous arguments that overlap in memory, of which at least one is written."""
    spans = [(tensor.device, tensor.data_ptr(), tensor.nbytes) for tensor in (tensors[a.name] for a in arguments)]
    return [
        f"`{written.name}`, which is written, shares memory with `{other.name}`; pass a tensor of its own"
        for at, (written, (device, start, size)) in enumerate(zip(arguments, spans, strict=True))
        if written.direction != "in"
        for number, (other, (its_device, its_start, its_size)) in enumerate(zip(arguments, spans, strict=True))
        if (number > at or (number < at and other.direction == "in"))
        and device == its_device
        and start < its_start + its_size
        and its_start < start + size
    ]


def check_rows(program: str, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raise ProgramError unless all tensors in `names`, whose rows are dynamic, have as many rows as the first."""
    rows = {name: tensors[name].shape[0] for name in names}
    if len(set(rows.values())) > 1:
        wrong = ", ".join(f"`{name}` {count}" for name, count in rows.items())
        raise ProgramError(f"{program} cannot be called: rows differ: {wrong}; pass as many of each")


def make_outputs(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeroed tensors for the "out" and "scratch" arguments that `tensors` lacks, sized for the inputs among them."""
    return {
        argument.name: torch.zeros(
            [program.dynamic_rows(argument.name, tensors) if size is None else size for size in argument.shape],
            dtype=argument.dtype,
        )
        for argument in program.arguments()
        if argument.name not in tensors and argument.direction in ("out", "scratch")
    }


def compare_outputs(
    program: Program, tensors: Mapping[str, Tensor], golden: Mapping[str, Tensor]
) -> tuple[Comparison, ...]:
    """Compare what a call left in `tensors` with `golden`, output by output, in torch and not by the verifier.

    A golden may say something of scratch too, which a call need not return. Raises ProgramError for an output that
    `tensors` lacks.
    """
    tolerances = program.tolerances()
    scratch = {argument.name for argument in program.arguments() if argument.direction == "scratch"}
    if lost := [name for name in golden if name not in tensors and name not in scratch]:
        raise ProgramError(f"{program.name} cannot be compared with its golden: outputs {', '.join(lost)} are missing")
    return tuple(
        _compare(name, tensors[name], want, tolerances.get(name, "exact"))
        for name, want in golden.items()
        if name in tensors
    )


def _compare(name: str, have: Tensor, want: Tensor, tolerance: str) -> Comparison:
    if have.shape != want.shape or have.dtype != want.dtype:
        return Comparison(name, float("inf"), f"{tolerance}; shape or dtype differs", False)
    ok = bool(TOLERANCES[tolerance](have, want))
    difference = (have.to(torch.float64) - want.to(torch.float64)).abs()
    return Comparison(name, float(difference.nan_to_num(float("inf")).max()), tolerance, ok)


def _exact(have: Tensor, want: Tensor) -> bool:
    return torch.equal(have, want)


def _one_ulp(have: Tensor, want: Tensor) -> bool:
    """At most one BF16 step apart; where a value is small beside its row, one step of the row's RMS."""
    row_rms = want.to(torch.float64).square().mean(dim=-1, keepdim=True).sqrt()
    _, exponent = torch.frexp(torch.maximum(want.to(torch.float64).abs(), row_rms))
    step = torch.exp2(exponent.to(torch.float64) - 8)
    return bool(((have.to(torch.float64) - want.to(torch.float64)).abs() <= step).all())


def _fp32_sum(have: Tensor, want: Tensor) -> bool:
    """FP32 sums of the same products in another order: 1e-5 of the row's largest magnitude."""
    allowed = want.abs().amax(dim=-1, keepdim=True) * 1e-5
    return bool(((have - want).abs() <= allowed).all())


def _input_step(have: Tensor, want: Tensor) -> bool:
    """FP32 sums over inputs of which one may be a BF16 step apart: 2^-8 of the row's largest magnitude."""
    allowed = want.abs().amax(dim=-1, keepdim=True) * 2.0**-8
    return bool(((have - want).abs() <= allowed).all())


TOLERANCES: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "exact": _exact,
    "1 BF16 ulp": _one_ulp,
    "FP32 summation order": _fp32_sum,
    "1 BF16 ulp of an input": _input_step,
}
