"""Rules on a model's shape as data: one relation each, with a name, so that a refusal says which and why.

A side of a rule is a number or a size of `ModelConfig` (`hidden_size`, `q_size`, `q_per_kv`, ...). Every problem names
both numbers. This module knows nothing of contracts or programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quantize.model_config import ModelConfig

__all__ = ["ShapeRule", "shape_problems"]

Relation = Literal["is", "at least", "at most", "a multiple of"]
FP32_ROUNDING = 1e-7
"""An epsilon may have passed through FP32 on its way into a config; sizes are far below where this matters."""
SIZES = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position_tokens",
)


@dataclass(frozen=True)
class ShapeRule:
    """`left` must be in `relation` to `right`; `why` is the reason in words."""

    name: str
    left: str
    relation: Relation
    right: str
    why: str

    def problem(self, config: ModelConfig) -> str | None:
        """What is wrong with `config`, naming the rule and both numbers; None when the rule holds."""
        left, right = _value(self.left, config), _value(self.right, config)
        if _holds(left, self.relation, right):
            return None
        wanted = _text(right) if _is_number(self.right) else f"{self.right} {_text(right)}"
        relation = "" if self.relation == "is" else f"{self.relation} "
        return f"{self.left} is {_text(left)}, expected {relation}{wanted} ({self.name}: {self.why})"


def shape_problems(rules: Iterable[ShapeRule], config: ModelConfig) -> list[str]:
    """Every rule that `config` breaks, as messages; a size below 1 is named alone, for the rules mean nothing then."""
    problems = [
        f"{name} is {getattr(config, name)}, expected at least 1" for name in SIZES if getattr(config, name) < 1
    ]
    return problems or [problem for rule in rules if (problem := rule.problem(config)) is not None]


def _value(side: str, config: ModelConfig) -> float:
    if _is_number(side):
        return int(side) if side.isdigit() else float(side)
    value: float = getattr(config, side)
    return value


def _text(value: float) -> str:
    """Sizes with every digit, other numbers with six."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _is_number(side: str) -> bool:
    return not side.isidentifier()


def _holds(left: float, relation: Relation, right: float) -> bool:
    match relation:
        case "is":
            return math.isclose(left, right, rel_tol=FP32_ROUNDING)
        case "at least":
            return left >= right
        case "at most":
            return left <= right
        case "a multiple of":
            return left % right == 0
