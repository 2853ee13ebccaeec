"""Reading recipes of people and of checkpoints: every bad key is named, and hostile text is not followed."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from quantize.errors import RecipeError
from quantize.recipe import Calibration, Gates, Gptq, ModuleScheme, Recipe, Search, Smoothing

MAX_RECIPE_BYTES = 2**20
MAX_SHOWN_BITS = 256
_EXPECTED = {
    "model_type": "expected a section of keys and values",
    "tuple_type": "expected a list",
    "float_type": "expected a number",
    "int_type": "expected a whole number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
}
"""Pydantic's types of errors in the words of YAML."""
# libyaml, where it is there, bounds the nesting by itself and is a hundred times faster on hostile text.
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _explain(error: ValidationError) -> list[str]:
    """Every bad key in our own words, unknown ones with the keys that exist there."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _known_keys(item["loc"][:-1])
            near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
            lines.append(
                f"{path}: unknown key; " + (f"did you mean {near[0]!r}?" if near else f"keys are {', '.join(known)}")
            )
        else:
            message = _EXPECTED.get(item["type"], item["msg"].removeprefix("Value error, "))
            found = "" if item["type"] in ("value_error", "missing") else f" (found {_shown(item['input'])})"
            lines.append(f"{path}: {message}{found}" if path else message + found)
    return lines


def _shown(value: object) -> str:
    """A value in a few words, however large it is."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)[:80]


def _known_keys(path: Sequence[int | str]) -> list[str]:
    """Keys of the section that `path` leads to."""
    model: type[BaseModel] = Recipe
    for part in path:
        if isinstance(part, str):
            model = _SECTIONS[part]
    return list(model.model_fields)


_SECTIONS: dict[str, type[BaseModel]] = {
    "gates": Gates,
    "schemes": ModuleScheme,
    "smoothing": Smoothing,
    "gptq": Gptq,
    "search": Search,
    "calibration": Calibration,
}


def parse_recipe(content: Mapping[str, Any] | None, origin: str) -> Recipe:
    """Build a recipe from parsed keys and values; None or nothing gives the defaults.

    Raises RecipeError that names `origin` (a file, or where else the content is from) and every bad key.
    """
    if content is not None and not isinstance(content, Mapping):
        raise RecipeError(f"{origin}: found a {type(content).__name__}, expected keys and values")
    try:
        return Recipe.model_validate(dict(content or {}))
    except ValidationError as error:
        raise RecipeError("\n  - ".join([f"{origin}: not a valid recipe", *_explain(error)])) from None


class _RecipeLoader(_YAML_LOADER):  # type: ignore[valid-type, misc]  # libyaml's loader or Python's
    """Refuses equal keys, of which YAML readers take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """See the base class."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, origin: str, *, aliases: bool = True) -> Any:
    """The values of a YAML text (or JSON); raises RecipeError naming `origin` for what is none, or nests too deep.

    Without `aliases`, which can spell a structure of any size in a few lines, they are refused.
    """
    try:
        if not aliases and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _RecipeLoader)):
            raise RecipeError(f"{origin}: not read: it has YAML aliases")
        return yaml.load(text, Loader=_RecipeLoader)  # a safe loader
    except yaml.YAMLError as error:
        found = str(error).replace('"<unicode string>"', "it")
        raise RecipeError(f"{origin}: not valid YAML: {found}") from None
    except RecursionError:
        raise RecipeError(f"{origin}: not valid YAML: nested too deep") from None
    except ValueError as error:  # dates that do not exist, numbers of thousands of digits
        raise RecipeError(f"{origin}: not valid YAML: {str(error)[:120]}") from None


def recipe_text(path: Path) -> str:
    """The text of a recipe file; raises RecipeError for one that is no regular file of a sensible size in UTF-8."""
    try:
        if not path.is_file() and path.exists():
            raise RecipeError(f"{path}: not a file; expected a recipe in YAML")
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(
                f"{path}: has {path.stat().st_size} bytes; expected a recipe of at most {MAX_RECIPE_BYTES}"
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from None


def load_recipe(path: Path | None) -> Recipe:
    """Read a recipe file (YAML, so JSON too); None gives the defaults. Raises RecipeError naming file and keys."""
    return Recipe() if path is None else parse_recipe(parse_yaml(recipe_text(path), str(path)), str(path))
