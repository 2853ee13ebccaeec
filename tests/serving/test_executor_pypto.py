"""The PyPTO executor in the host's interpreter against the golden decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.interpreter import run_program
from kernels.programs.decode_step import DecodeStep, DecodeStepSpec, step_rows
from kernels.programs.layer_slabs import stacked_slabs
from kernels.slabs import Slabs, load_slabs
from kernels.staging import stage_checkpoint
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from serving.errors import ExecutorError
from serving.executor.base import PAGE_TOKENS, Chunk
from serving.executor.cpu import CpuExecutor
from serving.executor.pypto import HostPrograms, PyptoExecutor
from serving.executor.pypto_prompts import HostPromptPrograms
from tests.slab_tools import stage
from tests.tiny_models import make_tiny_llama, make_tiny_qwen3

PAGES = 4


@pytest.fixture(scope="module")
def slabs(tmp_path_factory: pytest.TempPathFactory) -> Slabs:
    folder = tmp_path_factory.mktemp("pypto-executor")
    make_tiny_qwen3(folder / "model", num_hidden_layers=1)
    quantize_checkpoint(folder / "model", folder / "w8a8", Recipe())
    stage_checkpoint(folder / "w8a8", folder / "slabs")
    return load_slabs(folder / "slabs")


@pytest.fixture
def executor(slabs: Slabs) -> Iterator[PyptoExecutor]:
    opened = PyptoExecutor(slabs, PAGES)
    yield opened
    opened.close()


def golden_executor(slabs: Slabs) -> CpuExecutor:
    return CpuExecutor(slabs, PAGES, threads=1, backend="torch")


def prompt_and_two_steps(executor: PyptoExecutor | CpuExecutor) -> tuple[list[list[int]], list[Tensor]]:
    """Two sequences: their prompts, then two decode steps by the largest logit."""
    logits = [executor.forward([Chunk([5, 7, 9], 0, [1]), Chunk([11], 0, [3])])]
    tokens = [logits[0].argmax(dim=-1).tolist()]
    for step in range(2):
        first, second = tokens[-1]
        logits.append(executor.forward([Chunk([first], 3 + step, [1]), Chunk([second], 1 + step, [3])]))
        tokens.append(logits[-1].argmax(dim=-1).tolist())
    return tokens, logits


@pytest.mark.slow
def test_two_decode_steps_give_the_goldens_tokens(executor: PyptoExecutor, slabs: Slabs) -> None:
    tokens, logits = prompt_and_two_steps(executor)
    expected_tokens, expected_logits = prompt_and_two_steps(golden_executor(slabs))
    assert tokens == expected_tokens
    for found, expected in zip(logits, expected_logits, strict=True):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_prompt_cut_into_chunks_gives_the_same_bits(executor: PyptoExecutor, slabs: Slabs) -> None:
    prompt = list(range(5, 22))
    whole = executor.forward([Chunk(prompt, 0, [0], logits="all")])
    assert whole.shape == (17, slabs.real_vocab), "more rows than a window"
    first = executor.forward([Chunk(prompt[:3], 0, [2], logits="none"), Chunk([1], 0, [3])])
    last = executor.forward([Chunk(prompt[3:], 3, [2])])
    assert first.shape == (1, slabs.real_vocab)
    assert torch.equal(last[0], whole[16])


@pytest.mark.slow
def test_a_whole_step_gives_what_its_parts_give(slabs: Slabs) -> None:
    batch = [Chunk([5, 7, 9], 0, [1]), Chunk([11], 0, [3])]
    opened = PyptoExecutor(slabs, PAGES, HostPrograms(slabs, PAGES, whole_steps=True))
    expected = golden_executor(slabs).forward(batch)
    assert torch.allclose(opened.forward(batch), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_prompts_through_prefill_step_give_the_goldens_logits(slabs: Slabs) -> None:
    """Two prompts; then one of them goes on beside a decode row, both in the call; then both decode."""
    opened, golden = PyptoExecutor(slabs, PAGES, HostPromptPrograms(slabs, PAGES)), golden_executor(slabs)
    for batch in (
        [Chunk([5, 7, 9], 0, [1]), Chunk([11, 13], 0, [3], logits="none")],
        [Chunk([17], 3, [1]), Chunk([19, 23, 29], 2, [3])],
        [Chunk([31], 4, [1]), Chunk([37], 5, [3])],
    ):
        found, expected = opened.forward(batch), golden.forward(batch)
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_turboquant_cache_gives_about_what_the_cpu_executor_gives(slabs: Slabs) -> None:
    """Both keep the same codes; where they narrow to BF16 in attention differs, and so do the last bits."""
    opened = PyptoExecutor(slabs, PAGES, kv="turboquant4")
    cpu = CpuExecutor(slabs, PAGES, threads=1, backend="torch", kv="turboquant4")
    tokens, logits = prompt_and_two_steps(opened)
    expected_tokens, expected = prompt_and_two_steps(cpu)
    _, in_bf16 = prompt_and_two_steps(golden_executor(slabs))
    assert tokens == expected_tokens
    distance = max(float((have - want).abs().max()) for have, want in zip(logits, expected, strict=True))
    of_format = max(float((have - want).abs().max()) for have, want in zip(in_bf16, expected, strict=True))
    assert distance < of_format / 4, (distance, of_format)


def test_whole_steps_refuse_another_cache_than_theirs(slabs: Slabs) -> None:
    with pytest.raises(ExecutorError, match="found KV format turboquant4 for whole steps, which keep bf16"):
        HostPrograms(slabs, PAGES, whole_steps=True, kv="turboquant4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "layers", "first_token"), [(make_tiny_qwen3, 2, 7), (make_tiny_llama, 1, 11)], ids=["qwen3", "llama"]
)
def test_sixteen_tokens_without_the_host_are_the_cpu_executors(
    make: Callable[..., Path], layers: int, first_token: int, tmp_path: Path
) -> None:
    """One call of `decode_step` over sixteen steps: each takes the id of the one before as its token."""
    make(tmp_path / "model", num_hidden_layers=layers, tie_word_embeddings=False)
    slabs = stage(tmp_path / "model", tmp_path)
    config, tensors, steps, pages = slabs.config, slabs.tensors, 16, 2
    rope = (tensors["rope_cos"], tensors["rope_sin"])
    cache = torch.zeros(layers * pages * PAGE_TOKENS, config.kv_size, dtype=torch.bfloat16)
    arguments = {
        "x": tensors["embed_weight"][[first_token]],
        **stacked_slabs(tensors),
        **step_rows([0], [[1]], *rope, layers, pages * PAGE_TOKENS, steps),
        "final_norm": tensors["final_norm_weight"],
        "lm_head_weight": tensors["lm_head_weight"],
        "embed_weight": tensors["embed_weight"],
        "k_cache": cache,
        "v_cache": cache.clone(),
        "logits": torch.zeros(steps, slabs.real_vocab),
        "ids": torch.zeros(steps, 1, dtype=torch.int32),
    }
    program = DecodeStep(DecodeStepSpec.of(config, "int8", (1,), steps=steps, pages=pages))
    found = run_program(program, arguments)["ids"].flatten().tolist()
    executor = golden_executor(slabs)
    expected = [first_token]
    for position in range(steps):
        logits = executor.forward([Chunk([expected[-1]], position, [1])])
        expected.append(int(logits.argmax()))
    assert found == expected[1:]
    assert len(set(found)) > 4, "a constant text would show nothing"


def test_a_chunk_out_of_range_is_refused_before_anything_runs(executor: PyptoExecutor) -> None:
    with pytest.raises(ExecutorError, match=r"chunk 0 names page 4; expected pages in 0\.\.3"):
        executor.forward([Chunk([5], 0, [4])])
    with pytest.raises(ExecutorError, match="token id 320"):
        executor.forward([Chunk([320], 0, [0])])


def test_a_closed_executor_says_so(slabs: Slabs) -> None:
    opened = PyptoExecutor(slabs, PAGES)
    opened.close()
    opened.close()
    with pytest.raises(ExecutorError, match="closed"):
        opened.forward([Chunk([5], 0, [0])])


def test_no_pages_are_refused(slabs: Slabs) -> None:
    with pytest.raises(ExecutorError, match="num_pages is 0"):
        PyptoExecutor(slabs, 0)
