"""TurboQuant in the CPU executor: the same bits on every backend, and an effect that grows as bits are taken away."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.errors import ContractError
from kernels.slabs import Slabs
from kernels.turboquant import TurboQuant, theoretical_mse
from serving.executor import open_executor
from serving.executor.base import Chunk
from serving.executor.cpu import BackendName, CpuExecutor
from serving.executor.kv_codec import KvCodec, open_codec
from serving.executor.native_build import available_instruction_sets
from tests.slab_tools import stage

BATCH = [Chunk([(7 * i) % 320 for i in range(140)], 0, [0, 1], "all"), Chunk(list(range(9)), 0, [2], "all")]


@pytest.fixture(scope="module", params=["tiny_qwen3", "tiny_llama"])
def slabs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Slabs:
    return stage(request.getfixturevalue(request.param), tmp_path_factory.mktemp(request.param))


def logits(slabs: Slabs, kv: str, backend: BackendName = "native", instruction_set: str | None = None) -> Tensor:
    executor = CpuExecutor(slabs, 3, 2, backend, instruction_set, kv=kv)
    found = executor.forward(BATCH)
    executor.close()
    return found


@pytest.mark.parametrize("kv", ["turboquant4", "turboquant3-qjl"])
def test_torch_and_every_instruction_set_keep_the_same_bits(kv: str, slabs: Slabs) -> None:
    expected = logits(slabs, kv, "torch")
    for name in available_instruction_sets():
        assert torch.equal(logits(slabs, kv, "native", name), expected)


def test_fewer_bits_are_farther_from_the_bf16_cache(slabs: Slabs) -> None:
    exact = logits(slabs, "bf16")
    far = [float((logits(slabs, f"turboquant{bits}") - exact).square().mean()) for bits in (4, 3, 2)]
    assert 0 < far[0] < far[1] < far[2]


def test_keys_and_values_of_every_layer_are_turned_their_own_way(slabs: Slabs) -> None:
    codec = open_codec("turboquant3-qjl", slabs.config)
    assert codec is not None
    turns = [one.rotation for one in (*codec.keys, *codec.values)]
    assert len({bytes(turn.numpy().tobytes()) for turn in turns}) == 2 * slabs.config.num_layers
    assert all(one.projection is not None for one in codec.keys)
    assert all(one.projection is None for one in codec.values)


@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_codec_of_the_wrong_layer_shows(part: str, slabs: Slabs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sensitivity: were the layers' tables taken in another order, logits would not be the same."""
    expected = logits(slabs, "turboquant3")
    codec = open_codec("turboquant3", slabs.config)
    assert codec is not None
    turned = {"keys": codec.keys, "values": codec.values}
    turned[part] = turned[part][::-1]
    monkeypatch.setattr("serving.executor.cpu.open_codec", lambda name, config: KvCodec(**turned))
    assert not torch.equal(logits(slabs, "turboquant3"), expected)


def test_what_is_read_is_as_far_off_as_the_theory_says() -> None:
    x = torch.randn(256, 2, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).float()
    codec = KvCodec([TurboQuant(64, 4, seed=1)], [TurboQuant(64, 3, seed=2)])
    for found, bits in ((codec.key(0, x), 4), (codec.value(0, x), 3)):
        assert found.shape == x.shape
        error = float((found.float() - x).square().sum() / x.square().sum())
        assert error == pytest.approx(theoretical_mse(bits), rel=0.1)


def test_formats_that_do_not_exist_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="found KV format 'int4'; expected one of bf16"):
        open_executor(tmp_path / "nothing", "cpu", kv="int4")
