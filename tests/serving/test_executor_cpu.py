"""The CPU executor: exact integers on every instruction set, the golden's numbers, and rows that stand alone."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import goldens
from kernels.slabs import Slabs, load_slabs
from kernels.staging import stage_checkpoint
from serving.errors import ExecutorError
from serving.executor import native, native_build, open_executor
from serving.executor.base import Chunk
from serving.executor.cpu import BackendName, CpuExecutor
from serving.executor.native_build import NativeUnavailableError, available_instruction_sets
from tests.slab_tools import edit_checkpoint, stage
from tests.tiny_models import make_tiny_llama, make_tiny_qwen3

VOCAB = 320
FAMILIES = ("tiny_qwen3", "tiny_llama", "tiny_qwen2", "tiny_llama3", "tiny_mistral")
MAX_LOGIT_DIFFERENCE = 0.1
"""Bound on |executor - golden| over logits that span about +-5 (Qwen) and +-24 (Llama). A sum that rounds the other way
can move an INT8 code by one; a misplaced tensor moves logits by several times this bound (tested below)."""


@pytest.fixture(scope="module", params=FAMILIES)
def slabs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Slabs:
    return stage(request.getfixturevalue(request.param), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen3(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Slabs:
    return stage(tiny_qwen3, tmp_path_factory.mktemp("qwen3"))


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def golden_logits(slabs: Slabs, token_ids: Sequence[int]) -> Tensor:
    count = len(token_ids)
    pages = -(-count // goldens.PAGE_TOKENS)
    shape = (slabs.config.num_layers, pages * goldens.PAGE_TOKENS, slabs.config.kv_size)
    caches = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    table = torch.arange(pages).expand(count, -1)
    return goldens.forward(slabs, torch.tensor(token_ids), torch.arange(count), table, *caches)


def greedy(executor: CpuExecutor, prompt: Sequence[int], steps: int, pages: Sequence[int]) -> list[int]:
    """Prefill, then decode one token at a time; returns the generated ids."""
    logits = executor.forward([Chunk(prompt, 0, pages)])
    out = [int(logits[0].argmax())]
    while len(out) < steps:
        logits = executor.forward([Chunk([out[-1]], len(prompt) + len(out) - 1, pages)])
        out.append(int(logits[0].argmax()))
    return out


@pytest.mark.parametrize("instruction_set", available_instruction_sets())
@pytest.mark.parametrize(("rows", "k", "columns"), [(1, 16, 32), (3, 576, 40), (17, 4096, 96), (8, 1040, 33)])
def test_int8_products_are_exact_over_the_full_range(instruction_set: str, rows: int, k: int, columns: int) -> None:
    library = native.load_library(instruction_set)
    assert library.decoder_int8_path().decode() == instruction_set
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, k), generator=generator, dtype=torch.int8)
    weight = torch.randint(-128, 128, (k, columns), generator=generator, dtype=torch.int8)
    codes[0], weight[:, 0], weight[:, 1] = 127, -128, 127
    codes[rows - 1, ::2] = -127
    assert torch.equal(native.int8_matmul(library, codes, weight).long(), codes.long() @ weight.long())


@pytest.mark.parametrize("instruction_set", available_instruction_sets())
def test_the_longest_reduction_does_not_overflow(instruction_set: str) -> None:
    codes = torch.full((1, 65536), -127, dtype=torch.int8)
    weight = torch.full((65536, 1), -128, dtype=torch.int8)
    product = native.int8_matmul(native.load_library(instruction_set), codes, weight)
    assert product.item() == 127 * 128 * 65536


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_logits_agree_with_the_golden(backend: BackendName, slabs: Slabs) -> None:
    token_ids = tokens(200)
    expected = golden_logits(slabs, token_ids)
    executor = CpuExecutor(slabs, 4, 2, backend)
    logits = executor.forward([Chunk(token_ids, 0, [3, 1], "all")])
    executor.close()
    assert logits.shape == (200, VOCAB)
    assert (logits - expected).abs().max() < MAX_LOGIT_DIFFERENCE
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_greedy_tokens_equal_the_goldens_over_48_steps(slabs: Slabs) -> None:
    prompt = tokens(100, seed=3)
    for backend in ("native", "torch"):
        executor = CpuExecutor(slabs, 2, 1, backend)
        generated = greedy(executor, prompt, 48, [1, 0])
        executor.close()
        expected = golden_logits(slabs, prompt + generated).argmax(-1)[len(prompt) - 1 : -1]
        assert generated == expected.tolist()


def test_torch_and_every_instruction_set_give_the_same_bits(slabs: Slabs) -> None:
    batch = [Chunk(tokens(130), 0, [0, 1], "all"), Chunk(tokens(9, 2), 0, [2], "all")]
    plain = CpuExecutor(slabs, 3, 1, "torch")
    results = [plain.forward(batch)]
    for name in available_instruction_sets():
        executor = CpuExecutor(slabs, 3, 2, "native", name)
        assert executor.instruction_set == name
        results.append(executor.forward(batch))
        executor.close()
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_chunked_prefill_whole_prefill_and_decode_are_bit_equal(backend: BackendName, slabs: Slabs) -> None:
    token_ids = tokens(150)
    executor = CpuExecutor(slabs, 8, 2, backend)
    whole = executor.forward([Chunk(token_ids, 0, [5, 2], "all")])
    chunked, start = [], 0
    for size in (1, 63, 64, 2, 20):
        chunked.append(executor.forward([Chunk(token_ids[start : start + size], start, [0, 7], "all")]))
        start += size
    one_by_one = [executor.forward([Chunk([token], i, [3, 4])]) for i, token in enumerate(token_ids)]
    executor.close()
    assert torch.equal(torch.cat(chunked), whole)
    assert torch.equal(torch.cat(one_by_one), whole)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_batch_mates_and_threads_do_not_matter(backend: BackendName, slabs: Slabs) -> None:
    prompts = [tokens(length, seed=length) for length in (1, 5, 129, 40, 17, 3, 2, 8, 30, 11, 7)]
    together = CpuExecutor(slabs, 32, 2, backend)
    alone = CpuExecutor(slabs, 32, 1, backend)
    batch = [Chunk(prompt, 0, [2 * i, 2 * i + 1]) for i, prompt in enumerate(prompts)]
    prefilled = together.forward(batch)
    single = torch.cat([alone.forward([chunk]) for chunk in batch])
    assert torch.equal(prefilled, single)
    decode = [Chunk([7 + i], len(prompt), [2 * i, 2 * i + 1]) for i, prompt in enumerate(prompts)]
    assert torch.equal(
        together.forward(decode), torch.cat([alone.forward([chunk]) for chunk in reversed(decode)]).flip(0)
    )
    together.close()
    alone.close()


def test_a_step_longer_than_the_native_window_equals_shorter_ones(qwen3: Slabs) -> None:
    token_ids = tokens(native.MAX_ROWS + 88)
    executor = CpuExecutor(qwen3, 10, 2, "native")
    long = executor.forward([Chunk(token_ids, 0, [0, 1, 2, 3, 4]), Chunk(token_ids[:3], 0, [9], "all")])
    executor.forward([Chunk(token_ids[:300], 0, [5, 6, 7, 8, 9], "none")])
    short = executor.forward([Chunk(token_ids[300:], 300, [5, 6, 7, 8, 9])])
    executor.close()
    assert torch.equal(long[:1], short)
    assert long.shape == (4, VOCAB)


def test_logits_rows_follow_the_request(qwen3: Slabs) -> None:
    executor = CpuExecutor(qwen3, 4, 1, "native")
    every = executor.forward([Chunk(tokens(5), 0, [0], "all")])
    batch = [Chunk(tokens(5), 0, [1], "none"), Chunk(tokens(5), 0, [2], "all"), Chunk(tokens(5), 0, [3], "last")]
    mixed = executor.forward(batch)
    assert torch.equal(mixed, torch.cat([every, every[-1:]]))
    assert executor.forward([Chunk(tokens(5), 0, [1], "none")]).shape == (0, VOCAB)
    assert executor.forward([]).shape == (0, VOCAB)
    executor.close()


def test_down_bf16_agrees_with_the_golden(tiny_qwen3: Path, tmp_path: Path) -> None:
    slabs = stage(tiny_qwen3, tmp_path, down="bf16")
    token_ids = tokens(40)
    expected = golden_logits(slabs, token_ids)
    results = {}
    for backend in ("native", "torch"):
        executor = CpuExecutor(slabs, 1, 2, backend)
        results[backend] = executor.forward([Chunk(token_ids, 0, [0], "all")])
        rows = [executor.forward([Chunk([token], i, [0])]) for i, token in enumerate(token_ids)]
        assert torch.equal(torch.cat(rows), results[backend])
        executor.close()
        assert torch.equal(results[backend], results["native"])
        assert (results[backend] - expected).abs().max() < MAX_LOGIT_DIFFERENCE
        assert torch.equal(results[backend].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64},
        {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16},
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 48,
            "hidden_size": 80,
            "intermediate_size": 112,
        },
        {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 515},
    ],
    ids=["one-head", "group-of-7", "odd-blocks", "head-dim-128"],
)
def test_other_shapes_agree_with_the_golden(overrides: dict[str, Any], tmp_path: Path) -> None:
    slabs = stage(make_tiny_qwen3(tmp_path / "model", **overrides), tmp_path)
    token_ids = tokens(140)
    expected = golden_logits(slabs, token_ids)
    executor = CpuExecutor(slabs, 2, 2, "native")
    logits = executor.forward([Chunk(token_ids, 0, [1, 0], "all")])
    executor.close()
    assert torch.equal(logits, CpuExecutor(slabs, 2, 1, "torch").forward([Chunk(token_ids, 0, [0, 1], "all")]))
    assert logits.shape == (140, slabs.config.vocab_size)
    assert (logits - expected).abs().max() < MAX_LOGIT_DIFFERENCE
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.98


def test_widths_that_the_native_step_cannot_take_fall_back_to_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slabs = stage(make_tiny_llama(tmp_path / "model", hidden_size=72), tmp_path)
    with pytest.raises(NativeUnavailableError, match="hidden_size 72 is not a multiple of 16"):
        CpuExecutor(slabs, 1, 1, "native")
    with caplog.at_level(logging.WARNING):
        executor = CpuExecutor(slabs, 1, 1)
    assert executor.backend == "torch"
    assert [record.message for record in caplog.records if "using torch" in record.message]
    expected = golden_logits(slabs, tokens(20))
    assert (executor.forward([Chunk(tokens(20), 0, [0], "all")]) - expected).abs().max() < MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("model.layers.0.self_attn.k_proj.weight_scale", "model.layers.0.self_attn.v_proj.weight_scale"),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight"),
        ("model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_a_swap_in_the_checkpoint_is_seen(one: str, other: str, qwen3: Slabs, tmp_path: Path) -> None:
    """The tolerance of the agreement tests is far below the effect of any misplaced tensor."""

    def swap(tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    stage_checkpoint(edit_checkpoint(qwen3.directory.parent / "w8a8", tmp_path / "swapped", swap), tmp_path / "slabs")
    executor = CpuExecutor(load_slabs(tmp_path / "slabs"), 1, 1, "native")
    logits = executor.forward([Chunk(tokens(40), 0, [0], "all")])
    executor.close()
    assert (logits - golden_logits(qwen3, tokens(40))).abs().max() > 3 * MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk([], 0, [0]), "chunk 1 has no tokens"),
        (Chunk([0, 320], 0, [0]), r"chunk 1 has token id 320; expected ids in 0\.\.319"),
        (Chunk([-1], 0, [0]), "chunk 1 has token id -1"),
        (Chunk([10**12], 0, [0]), "chunk 1 has token id 1000000000000"),
        (Chunk([1], 0, [4]), r"chunk 1 names page 4; expected pages in 0\.\.3"),
        (Chunk([1], 0, [-1]), "chunk 1 names page -1"),
        (Chunk([1], 128, [0]), "chunk 1 has 1 pages; its 129 tokens need 2 of 128 tokens each"),
        (Chunk([1], 128, [2, 2]), "chunk 1 names a page twice"),
        (Chunk([1], -1, [0]), r"chunk 1 covers positions -1\.\.-1"),
        (Chunk([1], 2048, [0] * 17), r"chunk 1 covers positions 2048\.\.2048; expected positions in 0\.\.2047"),
        (Chunk([1], 0, [0], "some"), "chunk 1 asks for logits 'some'"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_bad_chunk_is_refused_and_its_neighbour_unharmed(
    backend: BackendName, chunk: Chunk, message: str, qwen3: Slabs
) -> None:
    executor = CpuExecutor(qwen3, 4, 1, backend)
    first = executor.forward([Chunk(tokens(5), 0, [3])])
    with pytest.raises(ExecutorError, match=message):
        executor.forward([Chunk([9], 5, [3]), chunk])
    # Had the refused batch run, position 5 of page 3 would hold token 9 and the next row would differ.
    second = executor.forward([Chunk([8], 5, [3])])
    assert torch.equal(executor.forward([Chunk([*tokens(5), 8], 0, [1])]), second)
    assert torch.equal(first, executor.forward([Chunk(tokens(5), 0, [2])]))
    executor.close()


def test_closing_twice_is_fine_and_a_closed_executor_refuses(qwen3: Slabs) -> None:
    executor = CpuExecutor(qwen3, 1, 2, "native")
    executor.close()
    executor.close()
    with pytest.raises(ExecutorError, match="closed"):
        executor.forward([Chunk([1], 0, [0])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pages": 0}, "num_pages is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        ({"instruction_set": "sse9"}, "instruction set 'sse9' cannot run here"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str, qwen3: Slabs) -> None:
    with pytest.raises(ExecutorError, match=message):
        CpuExecutor(qwen3, **{"num_pages": 1, **arguments})  # type: ignore[arg-type]


def test_open_executor_by_kind(qwen3: Slabs) -> None:
    cpu, plain = open_executor(qwen3.directory, "cpu", 2, 1), open_executor(qwen3.directory, "torch", 2)
    assert (cpu.backend, plain.backend) == ("native", "torch")  # type: ignore[attr-defined]
    assert cpu.num_pages == 2
    assert cpu.max_context_tokens == 2048
    with pytest.raises(ExecutorError, match="executor kind is 'gpu'"):
        open_executor(qwen3.directory, "gpu")  # type: ignore[arg-type]


def test_the_cache_memory_is_lazy(qwen3: Slabs) -> None:
    """100,000 pages are 6.5 GB here; an eager allocation would be felt at once."""
    executor = CpuExecutor(qwen3, 100_000, 1, "native")
    assert executor.forward([Chunk([1], 0, [99_999])]).shape == (1, VOCAB)
    executor.close()


# Building and caching the library


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYPTO_DEPLOY_CACHE", str(tmp_path / "cache"))
    native.load_library.cache_clear()
    yield tmp_path / "cache" / "native"
    native.load_library.cache_clear()


def test_the_library_is_built_once_and_rebuilt_when_damaged(
    fresh_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    portable = native_build.resolve_instruction_set("portable")
    path = native_build.build_library(portable)
    assert path.parent == fresh_cache
    stamp = path.stat().st_mtime_ns
    assert native_build.build_library(portable) == path
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(path.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING):
        assert native_build.build_library(portable) == path
    assert "is damaged; rebuilding it" in caplog.text
    native.load_library("portable")
    assert {entry.suffix for entry in fresh_cache.iterdir()} == {".so", ".sha256", ".lock"}


def test_the_key_follows_sources_flags_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = native_build.find_compiler()
    sets = [native_build.resolve_instruction_set(name) for name in available_instruction_sets()]
    keys = [native_build.library_key(compiler, each) for each in sets]
    assert len(set(keys)) == len(keys)
    copy = tmp_path / "csrc"
    copy.mkdir()
    for source in native_build.SOURCE_DIR.iterdir():
        (copy / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(native_build, "SOURCE_DIR", copy)
    assert native_build.library_key(compiler, sets[0]) == keys[0]
    (copy / "attention.hpp").write_text((copy / "attention.hpp").read_text() + "// changed\n")
    assert native_build.library_key(compiler, sets[0]) != keys[0]


def test_two_processes_share_one_build(fresh_cache: Path) -> None:
    script = "from serving.executor import native\nprint(native.load_library('portable')._name)"
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(names) == 1
    assert len(list(fresh_cache.glob("*.so"))) == 1


def test_without_a_compiler_torch_takes_over_with_one_warning(
    qwen3: Slabs, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        executor = CpuExecutor(qwen3, 1, 1)
    assert executor.backend == "torch"
    assert caplog.text.count("no C++ compiler (g++) was found") == 1
    assert executor.forward([Chunk([1, 2], 0, [0])]).shape == (1, VOCAB)
    with pytest.raises(NativeUnavailableError, match="install g"):
        CpuExecutor(qwen3, 1, 1, "native")


def test_a_failing_compiler_is_reported(
    qwen3: Slabs, fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "no such target" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING):
        executor = CpuExecutor(qwen3, 1, 1)
    assert executor.backend == "torch"
    assert "no such target" in caplog.text
    assert not list(fresh_cache.glob("*.so"))
