"""The golden decoder over slabs: against transformers, and against its own chunking."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kernels import goldens
from kernels.slabs import Slabs
from quantize.checkpoint import CheckpointReader
from tests.slab_tools import stage

PAGES = 4


def run(slabs: Slabs, token_ids: Tensor, chunks: list[int]) -> Tensor:
    """Logits of all tokens, run as consecutive chunks of the given sizes over pages in no particular order."""
    shape = (slabs.config.num_layers, PAGES * goldens.PAGE_TOKENS, slabs.config.kv_size)
    k_cache, v_cache = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    logits, start = [], 0
    for size in chunks:
        positions = torch.arange(start, start + size)
        table = torch.tensor([[2, 0]]).expand(size, -1)
        logits.append(goldens.forward(slabs, token_ids[start : start + size], positions, table, k_cache, v_cache))
        start += size
    return torch.cat(logits)


@pytest.fixture(scope="module", params=["tiny_qwen3", "tiny_llama", "tiny_qwen2", "tiny_llama3", "tiny_mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Slabs]:
    source = request.getfixturevalue(request.param)
    return source, stage(source, tmp_path_factory.mktemp(request.param))


def test_slabs_compute_what_transformers_computes_from_dequantized_weights(
    model: tuple[Path, Slabs], tmp_path: Path
) -> None:
    source, slabs = model
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    checkpoint = slabs.directory.parent / "w8a8"
    with CheckpointReader(checkpoint) as reader, torch.no_grad():
        for name, parameter in reference.named_parameters():
            value = reader.tensor(name)
            if value.dtype == torch.int8:
                value = value.float() * reader.weight_scale(name.removesuffix(".weight"))[:, None]
            parameter.copy_(value)
    token_ids = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = reference(token_ids[None]).logits[0]
    logits = run(slabs, token_ids, [150])
    # What is left is activation quantization and BF16 rounding: a few percent of the logits' spread.
    assert ((logits - expected).square().mean() / expected.square().mean()).sqrt() < 0.06
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.85


def test_chunks_do_not_change_greedy_tokens(model: tuple[Path, Slabs]) -> None:
    slabs = model[1]
    token_ids = torch.randint(0, 320, (140,), generator=torch.Generator().manual_seed(6))
    whole, cut = run(slabs, token_ids, [140]), run(slabs, token_ids, [1, 100, 30, 9])
    assert (whole - cut).abs().max() < 0.1
    assert torch.equal(goldens.greedy(whole, 320), goldens.greedy(cut, 320))


def test_padded_ids_never_win() -> None:
    logits = torch.zeros(2, 512)
    logits[:, 400] = 9.0
    logits[1, 7] = 1.0
    assert goldens.greedy(logits, 320).tolist() == [0, 7]
