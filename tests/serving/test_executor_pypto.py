"""The PyPTO executor in the host's interpreter against the golden decoder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.slabs import Slabs, load_slabs
from kernels.staging import stage_checkpoint
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from serving.errors import ExecutorError
from serving.executor.base import Chunk
from serving.executor.cpu import CpuExecutor
from serving.executor.pypto import PyptoExecutor
from tests.tiny_models import make_tiny_qwen3

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
    prompt = [5, 7, 9, 11]
    whole = executor.forward([Chunk(prompt, 0, [0], logits="all")])
    assert whole.shape == (4, slabs.real_vocab)
    first = executor.forward([Chunk(prompt[:3], 0, [2], logits="none"), Chunk([1], 0, [3])])
    last = executor.forward([Chunk(prompt[3:], 3, [2])])
    assert first.shape == (1, slabs.real_vocab)
    assert torch.equal(last[0], whole[3])


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
