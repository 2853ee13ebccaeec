"""How a cache may keep keys and values: the names, without the arithmetic (`turboquant`) or torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kernels.errors import ContractError


class KvName(StrEnum):
    """`bf16`, or TurboQuant with so many bits a coordinate; with `-qjl` one of a key's bits is the sketch's."""

    bf16 = "bf16"
    turboquant2 = "turboquant2"
    turboquant2_qjl = "turboquant2-qjl"
    turboquant3 = "turboquant3"
    turboquant3_qjl = "turboquant3-qjl"
    turboquant4 = "turboquant4"
    turboquant4_qjl = "turboquant4-qjl"


KV_FORMATS = tuple(name.value for name in KvName)


@dataclass(frozen=True)
class KvFormat:
    """TurboQuant with `bits` a coordinate; `sketch` spends one bit of the keys' on unbiased inner products."""

    bits: int
    sketch: bool


def parse_kv_format(name: str) -> KvFormat | None:
    """The format that `name` of KV_FORMATS means, None for `bf16`; raises ContractError for another name."""
    if name not in KV_FORMATS:
        raise ContractError(f"found KV format {name!r}; expected one of {', '.join(KV_FORMATS)}")
    match = re.fullmatch(r"turboquant(\d)(-qjl)?", name)
    return None if match is None else KvFormat(int(match[1]), match[2] is not None)
