"""GGUF sources: the header reader against hostile bytes, and the conversion of a tiny real Llama file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantize.checkpoint import CheckpointReader, payload_digest
from quantize.errors import CheckpointError
from quantize.gguf_header import read_gguf_header
from quantize.gguf_source import convert_gguf
from quantize.preflight import check_source
from quantize.summary import summarize_checkpoint, summarize_gguf
from tests.tiny_models import BOS_ID, EOS_ID, VOCAB_SIZE, make_tiny_llama

HEADS, KV_HEADS, LAYERS = 4, 2, 2
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave_heads(weight: Tensor, heads: int) -> Tensor:
    """Rows in GGUF's order for Llama: a head's rotary halves interleaved (llama.cpp's convert script)."""
    dim = weight.shape[0] // heads
    return weight.view(heads, 2, dim // 2, -1).transpose(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """The GGUF name of a Llama tensor."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[module]}.weight"


def write_gguf(
    checkpoint: Path, path: Path, *, skip: str = "", edit: Callable[[gguf.GGUFWriter], None] | None = None
) -> Path:
    """A GGUF file of a tiny tied Llama checkpoint, weights as BF16 values in FP32."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    tokens += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 or index >= 300 else 1 for index in range(VOCAB_SIZE)])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    if edit is not None:
        edit(writer)
    with CheckpointReader(checkpoint) as reader:
        for name in reader.infos:
            tensor = reader.tensor(name).to(torch.float32)
            if "q_proj" in name or "k_proj" in name:
                tensor = interleave_heads(tensor, HEADS if "q_proj" in name else KV_HEADS)
            if gguf_name(name) != skip:
                writer.add_tensor(gguf_name(name), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("gguf") / "llama", head_dim=16)


@pytest.fixture(scope="module")
def tiny_gguf(llama: Path) -> Path:
    return write_gguf(llama, llama.parent / "tiny.gguf")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(tensors: int, entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def test_the_converted_checkpoint_holds_the_original_tensors(llama: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    out = convert_gguf(tiny_gguf, tmp_path / "out")
    with CheckpointReader(llama) as expected, check_source(out) as found:
        assert set(found.infos) == set(expected.infos)
        for name in expected.infos:
            assert torch.equal(found.tensor(name), expected.tensor(name)), name
        assert found.config.eos_token_ids == expected.config.eos_token_ids
    ids = torch.arange(3, 40)[None]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (llama, out)]
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    phrase = "the rabbit-hole went straight on"
    expected_ids = AutoTokenizer.from_pretrained(llama)(phrase)["input_ids"]
    assert AutoTokenizer.from_pretrained(out)(phrase)["input_ids"][-len(expected_ids) :] == expected_ids


def test_conversion_is_deterministic_and_quiet(
    tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = (payload_digest(convert_gguf(tiny_gguf, tmp_path / name)) for name in ("a", "b"))
    assert first == second
    assert capfd.readouterr() == ("", "")


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head(0, 1) + text(b"general.architecture") + struct.pack("<I", 8) + text(b"mamba"))
    with pytest.raises(CheckpointError, match=r"architecture 'mamba', expected one of"):
        convert_gguf(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_rope_scaling_is_refused_rather_than_ignored(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(
        llama, tmp_path / "x.gguf", edit=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    )
    with pytest.raises(CheckpointError, match=r"RoPE scaling \(type 'yarn'\)"):
        convert_gguf(path, tmp_path / "out")
    factors = torch.ones(8).numpy()
    path = write_gguf(llama, tmp_path / "y.gguf", edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    with pytest.raises(CheckpointError, match=r"RoPE scaling \(tensor rope_freqs\.weight\)"):
        convert_gguf(path, tmp_path / "out")


def test_a_missing_tensor_does_not_become_random_weights(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "x.gguf", skip="blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_a_used_target_is_refused_before_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("")
    with pytest.raises(CheckpointError, match="exists already"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"\x80\x04pickle", "not a GGUF file"),
        (b"GGUF", "announced at byte 4"),
        (head(0, 0, version=1), "version 1, expected 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (head(2**60, 0), "tensors and 0 metadata entries"),
        (head(0, 1) + struct.pack("<Q", 2**40), "a text of 1099511627776 bytes"),
        (head(0, 1) + text(b"k") + struct.pack("<I", 99), "unknown type 99"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 0, 2**62), "4611686018427387904 bytes are announced"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**62), "8 bytes are announced"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "array of values of type 9"),
        (head(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0), "general.alignment is 0"),
        (head(1, 0) + text(b"t") + struct.pack("<I", 2**31), "dimensions"),
        (head(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 4, 77, 0), "unknown type 77"),
        (head(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0) + bytes(20), "ends at 16, the file's data at"),
    ],
)
def test_damaged_and_hostile_headers_are_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        convert_gguf(path, tmp_path / "out")
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_every_truncation_of_a_real_file_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    assert len(read_gguf_header(tiny_gguf).tensors) == 2 + 9 * LAYERS
    path = tmp_path / "x.gguf"
    for length in [*range(0, len(content), 4099), len(content) - 300]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_gguf_header(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupted_headers_never_raise_anything_else(data: st.DataObject, tiny_gguf: Path, tmp_path: Path) -> None:
    content = bytearray(tiny_gguf.read_bytes()[:12000])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_gguf_header(path)


def test_a_gguf_file_is_described_from_its_header(tiny_gguf: Path, llama: Path) -> None:
    summary, source = summarize_gguf(tiny_gguf), summarize_checkpoint(llama)[0]
    assert (summary.kind, summary.family, summary.good_for) == ("gguf", "llama", "quantize")
    assert summary.parameters == source.parameters
    assert summary.tied
    assert set(summary.shape.items()) <= set(source.shape.items())
    assert summary.shape["vocab_size"] == 320
    assert summary.problems == ()


def test_a_gguf_file_that_cannot_be_converted_is_described_with_the_reasons(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(
        llama, tmp_path / "x.gguf", edit=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    )
    summary = summarize_gguf(path)
    assert summary.good_for is None
    assert summary.rope["type"] == "yarn"
    assert "RoPE scaling" in summary.problems[0]
