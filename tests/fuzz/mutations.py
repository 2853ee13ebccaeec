"""Mutations of a checkpoint directory: bytes, JSON and files, each a function of a seeded random generator.

They aim at what a reader might believe without checking: lengths, offsets, counts, names, nesting, links.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[random.Random, Path], str]
"""Changes one thing in a checkpoint directory and says what; the directory's sibling `outside` holds a secret."""

HUGE_NUMBERS = [2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -1, -(2**63), 0, 1]
STRINGS = [
    "",
    "../outside/secret",
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    "a/b.safetensors",
    "a\\b.safetensors",
    "C:x.safetensors",
    "\ud800.safetensors",
    "\udcff",
    "x\0y.safetensors",
    "\x1b[31m\n\r.safetensors",
    "\u202e.safetensors",
    "n" * 5000,
    "model.safetensors",
    "re:(a+)+$",
    "re:(.*)*x",
    "re:((((((((.*)*)*)*)*)*)*)*)*y",
    "re:[",
    "re:" + "(" * 400,
    "re:(.?){500}" * 20,
    "yarn",
    "llama3",
    "bfloat16",
    "model.layers." + "9" * 5000 + ".mlp.up_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "\u0663",
]
RAW_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 5000, "1" + "0" * 400, "0.1e1", "-0"]
LITERAL = "@@literal@@"
MAX_EDITED_BYTES = 10**7


def _files(directory: Path, pattern: str = "*") -> list[Path]:
    """Ordinary files by name, without links and the holes that `replace_file` makes, which are too long to edit."""
    found = [path for path in sorted(directory.glob(pattern)) if path.is_file() and not path.is_symlink()]
    return [path for path in found if path.stat().st_size < MAX_EDITED_BYTES]


def _pick_file(rng: random.Random, directory: Path) -> Path:
    """A file that is there, the ones that are parsed more often than the rest."""
    files = _files(directory)
    parsed = [path for path in files if path.suffix in (".json", ".safetensors")]
    return rng.choice(parsed if parsed and rng.random() < 0.9 else files)


def _header_end(content: bytes) -> int:
    if len(content) < 8:
        return len(content)
    return int(min(8 + struct.unpack("<Q", content[:8])[0], len(content)))


def _position(rng: random.Random, path: Path, content: bytes) -> int:
    """A place in a file, mostly in the header of a shard."""
    end = _header_end(content) if path.suffix == ".safetensors" and rng.random() < 0.9 else len(content)
    return rng.randrange(end) if end else 0


def flip_bits(rng: random.Random, directory: Path) -> str:
    """Flip 1 to 20 bits of a file."""
    path = _pick_file(rng, directory)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        if content:
            content[_position(rng, path, content)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"flip bits of {path.name}"


def replace_bytes(rng: random.Random, directory: Path) -> str:
    """Overwrite, insert or delete a run of bytes."""
    path = _pick_file(rng, directory)
    content = path.read_bytes()
    start = _position(rng, path, content)
    length = rng.choice([0, 1, 2, 8, 100])
    pieces = [b"", b"\0" * 8, b"\xff" * 8, b"[" * 2000, b'{"a":' * 2000, b"9" * 50, b'"', b"}", b",", rng.randbytes(16)]
    path.write_bytes(content[:start] + rng.choice(pieces) + content[start + length :])
    return f"replace bytes of {path.name}"


def truncate(rng: random.Random, directory: Path) -> str:
    """Cut a file's end, or add to it."""
    path = _pick_file(rng, directory)
    content = path.read_bytes()
    cut = content[: rng.randrange(len(content) + 1)]
    path.write_bytes(cut if rng.random() < 0.7 else content + rng.randbytes(rng.choice([1, 7, 1000])))
    return f"truncate or extend {path.name}"


def splice(rng: random.Random, directory: Path) -> str:
    """Copy a run of one file over a place of another (or the same)."""
    source, target = _pick_file(rng, directory), _pick_file(rng, directory)
    donor, content = source.read_bytes(), target.read_bytes()
    begin = _position(rng, source, donor)
    run = donor[begin : begin + rng.choice([1, 4, 30, 300, 5000])]
    start = _position(rng, target, content)
    skip = len(run) if rng.random() < 0.5 else 0
    target.write_bytes(content[:start] + run + content[start + skip :])
    return f"splice {source.name} into {target.name}"


def header_length(rng: random.Random, directory: Path) -> str:
    """State another header length."""
    shards = _files(directory, "*.safetensors")
    if not shards:
        return flip_bits(rng, directory)
    path = rng.choice(shards)
    content = path.read_bytes()
    if len(content) < 8:
        return truncate(rng, directory)
    actual = struct.unpack("<Q", content[:8])[0]
    lengths = [0, 1, 2, 7, actual - 1, actual + 1, len(content) - 8, len(content), 25 * 10**6, 2**31, 2**63, 2**64 - 1]
    path.write_bytes(struct.pack("<Q", rng.choice(lengths) % 2**64) + content[8:])
    return f"header length of {path.name}"


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice(HUGE_NUMBERS)
    if kind == 1:
        return rng.choice(STRINGS)
    if kind == 2:
        return LITERAL + rng.choice(RAW_NUMBERS)
    if kind == 3:
        return rng.choice([None, True, False, [], {}, "", 0, 0.5, 1])
    if kind == 4 and depth < 2:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5 and depth < 2:
        return {rng.choice(STRINGS): _value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 6:
        nested: Any = 1
        for _ in range(rng.choice([10, 100, 400])):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    if kind == 7:
        return LITERAL + "[" * rng.choice([2000, 100_000])
    return rng.randrange(-5, 300)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, as keys and indexes from the top."""
    places = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            places += _places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            places += _places(inner, (*path, index))
    return places


def _edit_object(rng: random.Random, content: dict[str, Any]) -> str:
    """Change one place of a JSON object in place; returns what was done."""
    places = _places(content)
    if not places:
        content[rng.choice(STRINGS)] = _value(rng)
        return "add a key"
    place = rng.choice(places)
    holder: Any = content
    for key in place[:-1]:
        holder = holder[key]
    action = rng.randrange(6)
    if action == 0:
        del holder[place[-1]]
        return "delete"
    if action == 1 and isinstance(holder, dict):
        holder[rng.choice(STRINGS)] = holder.pop(place[-1])
        return "rename"
    if action == 2 and isinstance(holder, dict):
        holder[rng.choice(STRINGS)] = _value(rng)
        return "add"
    if action == 3:
        other = rng.choice(places)
        value: Any = content
        for key in other:
            value = value[key]
        holder[place[-1]] = json.loads(json.dumps(value))
        return "copy from elsewhere"
    if isinstance(holder[place[-1]], int) and not isinstance(holder[place[-1]], bool) and rng.random() < 0.5:
        holder[place[-1]] += rng.choice([-1, 1, 2**31, 10**18])
        return "shift a number"
    holder[place[-1]] = _value(rng)
    return "replace"


def _dumps(rng: random.Random, content: Any) -> bytes:
    """JSON with the literals of `RAW_NUMBERS` in place, sometimes with a key doubled."""
    text = json.dumps(content)
    while (start := text.find(f'"{LITERAL}')) >= 0:
        end = text.index('"', start + 1)
        text = text[:start] + text[start + 1 + len(LITERAL) : end] + text[end + 1 :]
    if rng.random() < 0.1 and text.startswith("{") and '"' in text:
        end = text.find(":")
        text = "{" + text[1:end] + ": 1, " + text[1:]
    return text.encode("utf-8", "surrogatepass")


def edit_json(rng: random.Random, directory: Path) -> str:
    """Change a place or two of a JSON file."""
    paths = _files(directory, "*.json")
    paths += [path for path in paths if path.name in ("config.json", "model.safetensors.index.json")] * 3
    if not paths:
        return flip_bits(rng, directory)
    path = rng.choice(paths)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return replace_bytes(rng, directory)
    if not isinstance(content, dict):
        return replace_bytes(rng, directory)
    done = [_edit_object(rng, content) for _ in range(rng.choice([1, 1, 2, 4]))]
    path.write_bytes(_dumps(rng, content))
    return f"{path.name}: {', '.join(done)}"


def edit_header(rng: random.Random, directory: Path) -> str:
    """Change a place or two of a shard's header, with the stated length put right."""
    shards = _files(directory, "*.safetensors")
    if not shards:
        return edit_json(rng, directory)
    path = rng.choice(shards)
    content = path.read_bytes()
    end = _header_end(content)
    try:
        header = json.loads(content[8:end])
    except (ValueError, RecursionError):
        return replace_bytes(rng, directory)
    if not isinstance(header, dict):
        return replace_bytes(rng, directory)
    done = [_edit_object(rng, header) for _ in range(rng.choice([1, 1, 2, 4]))]
    raw = _dumps(rng, header)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + content[end:])
    return f"header of {path.name}: {', '.join(done)}"


def escape_by_index(rng: random.Random, directory: Path) -> str:
    """An index whose shard names lead elsewhere."""
    path = directory / "model.safetensors.index.json"
    names = [*STRINGS, "../outside/model.safetensors", str(directory.parent / "outside" / "model.safetensors")]
    weight_map = {"model.norm.weight": rng.choice(names), rng.choice(STRINGS): rng.choice(names)}
    if path in _files(directory):
        try:
            index = json.loads(path.read_bytes())
            weight_map = {**index["weight_map"], **weight_map}
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
    path.unlink(missing_ok=True)
    path.write_bytes(json.dumps({"weight_map": weight_map}).encode("utf-8", "surrogatepass"))
    return "index leads elsewhere"


def replace_file(rng: random.Random, directory: Path) -> str:
    """A link, loop, folder, pipe, hole or nothing where a file was; or a new one under a name that is copied."""
    names = [path.name for path in sorted(directory.iterdir())]
    names += ["LICENSE-\udcff", "NOTICE", "tokenizer.model", "chat_template.json", "recipe.yaml", "x.tiktoken"]
    path = directory / rng.choice(names)
    kind = rng.randrange(8)
    if path.is_dir() and not path.is_symlink():
        return "leave a folder"
    path.unlink(missing_ok=True)
    outside = directory.parent / "outside"
    if kind == 0:
        path.symlink_to(rng.choice([outside / "secret", outside / "model.safetensors", outside, Path("/dev/zero")]))
    elif kind == 1:
        path.symlink_to(path.name)
    elif kind == 2:
        path.symlink_to("absent")
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        os.mkfifo(path)
    elif kind == 5:
        path.touch()
    elif kind == 6:
        with path.open("wb") as file:
            file.truncate(rng.choice([2**20, 2**31, 2**40]))
    return f"replace {path.name!r} by kind {kind}"


MUTATIONS: tuple[Mutation, ...] = (
    flip_bits,
    replace_bytes,
    truncate,
    splice,
    header_length,
    edit_json,
    edit_json,
    edit_json,
    edit_header,
    edit_header,
    edit_header,
    escape_by_index,
    replace_file,
)


def mutate(rng: random.Random, directory: Path) -> list[str]:
    """Apply one to three random mutations; returns what was done."""
    return [rng.choice(MUTATIONS)(rng, directory) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
