"""Text rules: incremental decoding (case 16) and stop strings (case 15)."""

from __future__ import annotations

import itertools
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from transformers import PreTrainedTokenizerFast

from serving.engine import Engine, GenerationRequest
from serving.errors import RequestError
from serving.sampling_params import SamplingParams
from serving.stop_strings import StopStringMatcher
from serving.tokenizer import REPLACEMENT, IncrementalDecoder, Tokenizer
from tests.serving.golden_executor import ScriptedExecutor
from tests.tiny_models import EOS_ID, byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())


def matched(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """Deltas of `pieces` as a stream would show them, and whether a stop string ended the text."""
    matcher = StopStringMatcher(stops)
    deltas = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        deltas.append(text)
        if stopped:
            return deltas, True
    return [*deltas, matcher.flush()], False


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stopped"),
    [
        (["lo.", "\n", "\nUs", "er: x"], ["\nUser"], "lo.\n", True),
        (["a.b"], ["."], "a", True),
        (["xx Hello World"], ["World", "Hello"], "xx ", True),
        (["say ", "Hel", "lo World"], ["World", "Hello"], "say ", True),
        (["ab", "cd", "ef"], ["cdef", "bcdef"], "a", True),
        (["ab", "c"], ["abcd"], "abc", False),
        (["aa", "ab"], ["aab"], "a", True),
        (["ab\u00e9", "\u0301"], ["\u00e9\u0301"], "ab", True),
        (["one"], [], "one", False),
    ],
)
def test_case_15_stop_strings(pieces: list[str], stops: list[str], text: str, stopped: bool) -> None:
    deltas, found = matched(pieces, stops)
    assert ("".join(deltas), found) == (text, stopped)


@given(st.text("ab.", max_size=12), st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3), st.randoms())
@settings(max_examples=300, deadline=None)
def test_stop_strings_do_not_depend_on_the_cut(text: str, stops: list[str], rng: random.Random) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    cuts = sorted(rng.choices(range(len(text) + 1), k=4))
    pieces = [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]
    deltas, found = matched(pieces, stops)
    assert ("".join(deltas), found) == (expected, bool(ends))


@pytest.mark.parametrize(
    "text",
    [
        "plain words, and more words",
        "\U0001f600 and \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466!",
        "\u4f60\u597d\uff0c\u4e16\u754c",
        "e\u0301 n\u0303 \u0e01\u0e33",
        "ends in \U0001f600",
        "a mark of its own: \ufffd, and \ufffd\ufffd\ufffd\ufffd at the end \ufffd",
    ],
)
def test_case_16_deltas_hold_whole_characters(text: str) -> None:
    ids = TOKENIZER.encode(text)
    decoder = IncrementalDecoder(TOKENIZER)
    deltas = [decoder.push(token_id) for token_id in ids]
    deltas.append(decoder.flush())
    assert "".join(deltas) == TOKENIZER.decode(ids) == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in delta for delta in deltas)
    assert len([delta for delta in deltas if delta]) > 2, "text is shown as it comes"


def test_text_that_ends_inside_a_character_shows_it_at_the_end_only() -> None:
    ids = TOKENIZER.encode("ab\U0001f600")[:-1]
    decoder = IncrementalDecoder(TOKENIZER)
    assert REPLACEMENT not in "".join(decoder.push(token_id) for token_id in ids)
    assert decoder.flush() == TOKENIZER.decode(ids)[2:] == REPLACEMENT


@given(st.lists(st.integers(0, 319), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_ids_decode_to_the_same_text_piece_by_piece(ids: list[int]) -> None:
    decoder = IncrementalDecoder(TOKENIZER)
    pieces = [decoder.push(token_id) for token_id in ids]
    assert "".join([*pieces, decoder.flush()]) == TOKENIZER.decode(ids)


def sentencepiece_tokenizer() -> Tokenizer:
    """Word tokens with a leading-space mark, byte tokens for all else; decoding strips the text's first space."""
    words = ["\u2581the", "\u2581sea", "s", "\u2581", "<s>"]
    vocab = {token: index for index, token in enumerate(["<unk>", *words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    fast = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>"))


def test_tokenizers_that_strip_a_leading_space_keep_the_others() -> None:
    tokenizer = sentencepiece_tokenizer()
    the, sea, plural, space, special = 1, 2, 3, 4, 5
    smile = [6 + byte for byte in "\U0001f600".encode()]
    for ids, text in (
        ([the, sea, plural, the, sea], "the seas the sea"),
        ([special, the, special, sea, *smile, the], "the sea\U0001f600 the"),
        ([space, the, space, space, sea], " the   sea"),
        ([*smile, *smile, sea], "\U0001f600\U0001f600 sea"),
    ):
        decoder = IncrementalDecoder(tokenizer)
        pieces = [decoder.push(token_id) for token_id in ids]
        assert "".join([*pieces, decoder.flush()]) == tokenizer.decode(ids) == text
        assert all(REPLACEMENT not in piece for piece in pieces)


def test_bytes_that_are_no_text_do_not_silence_what_follows() -> None:
    tokenizer = sentencepiece_tokenizer()
    smile = [6 + byte for byte in "\U0001f600".encode()]
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in [*smile, *[6 + 0x80] * 9, 1, 2, 1, 2]]
    assert pieces[3] == "\U0001f600"
    assert "".join(pieces).endswith(" the sea the sea")


def generate(script_text: str, **params: object) -> tuple[list[str], str | None]:
    engine = Engine(ScriptedExecutor([*TOKENIZER.encode(script_text), EOS_ID]), TOKENIZER)
    sampling = SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]
    engine.add(GenerationRequest("a", (9,), sampling))
    events = []
    while engine.has_work:
        events += engine.step()
    return [event.text for event in events], events[-1].finish_reason


@pytest.mark.parametrize(
    ("script", "params", "text", "finish"),
    [
        ("so lo.\n\nUser: x", {"stop": ("\nUser",)}, "so lo.\n", "stop"),
        ("caf\u00e9 \U0001f600 tail", {"stop": ("\U0001f600",)}, "caf\u00e9 ", "stop"),
        ("half a stop: \nUs", {"stop": ("\nUser",)}, "half a stop: \nUs", "stop"),
        ("abc", {"stop": ("c\ufffd",), "max_tokens": 3}, "abc", "length"),
        ("x\U0001f600", {"max_tokens": 3}, "x\ufffd", "length"),
        ("x\U0001f600", {"max_tokens": 3, "stop": ("\ufffd",)}, "x", "stop"),
    ],
)
def test_engine_text(script: str, params: dict[str, object], text: str, finish: str) -> None:
    deltas, reason = generate(script, **params)
    assert ("".join(deltas), reason) == (text, finish)


def test_chat_template_is_applied_as_transformers_does() -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    expected = byte_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    ids = expected["input_ids"] if not isinstance(expected, list) else expected
    assert TOKENIZER.encode_chat(messages) == list(ids)


def test_a_model_without_chat_template_says_what_to_use() -> None:
    plain = byte_tokenizer()
    plain.chat_template = None
    with pytest.raises(RequestError, match="/v1/completions"):
        Tokenizer(plain).encode_chat([{"role": "user", "content": "hi"}])
    plain.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer(plain).encode_chat([{"role": "user", "content": "hi"}])
