"""The engine on a tiny real model: scheduling, pages, prefix reuse, preemption, limits, sampling independence."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from serving.engine import Engine, EngineOptions, GenerationRequest, TokenEvent, is_idle
from serving.errors import ExecutorError, RequestError
from serving.executor.base import PAGE_TOKENS, Chunk
from serving.kv_cache import PagePool, chain_digest
from serving.sampler import Sampler
from serving.sampling_params import SamplingParams
from serving.sequence import Sequence as EngineSequence
from serving.tokenizer import Tokenizer
from tests.serving.golden_executor import GoldenExecutor, ScriptedExecutor
from tests.tiny_models import EOS_ID, byte_tokenizer

GREEDY_8 = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(3, 300) for _ in range(length))


def run(engine: Engine, *requests: GenerationRequest) -> dict[str, list[TokenEvent]]:
    """Add all requests and step until the engine is idle."""
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    assert is_idle(engine.counters())
    return events


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def solo(prompt_ids: tuple[int, ...], params: SamplingParams, tokenizer: Tokenizer) -> list[int]:
    engine = Engine(GoldenExecutor(), tokenizer, EngineOptions(prefix_cache=False))
    return tokens(run(engine, GenerationRequest("solo", prompt_ids, params))["solo"])


def test_tokens_do_not_depend_on_chunking_or_batch_mates(tokenizer: Tokenizer) -> None:
    prompts = {f"r{index}": prompt(length, index) for index, length in enumerate((1, 40, 127, 128, 129, 200))}
    requests = [GenerationRequest(name, ids, GREEDY_8) for name, ids in prompts.items()]
    options = EngineOptions(max_batch_tokens=48, max_running=5, prefix_cache=False)
    executor = GoldenExecutor()
    together = run(Engine(executor, tokenizer, options), *requests)
    for name, ids in prompts.items():
        assert tokens(together[name]) == solo(ids, GREEDY_8, tokenizer), name
    assert max(sum(len(chunk.token_ids) for chunk in batch) for batch in executor.batches) <= 48
    assert max(len(batch) for batch in executor.batches) <= 5
    assert any(chunk.logits == "none" for batch in executor.batches for chunk in batch), "nothing was chunked"


def test_decode_goes_before_prefill(tokenizer: Tokenizer) -> None:
    executor = GoldenExecutor()
    engine = Engine(executor, tokenizer, EngineOptions(max_batch_tokens=32, max_running=4))
    engine.add(GenerationRequest("short", prompt(8), GREEDY_8))
    engine.step()
    engine.add(GenerationRequest("long", prompt(300, 1), GREEDY_8))
    engine.step()
    first, second = executor.batches[-1]
    assert (len(first.token_ids), first.start_position) == (1, 8)
    assert (len(second.token_ids), second.logits) == (31, "none")


@pytest.mark.parametrize("num_pages", [3, 4, 5])
def test_case_21_preemption_loses_nothing(tokenizer: Tokenizer, num_pages: int) -> None:
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    prompts = {f"r{index}": prompt(20, index) for index in range(8)}
    # Each request ends with two pages, so the pages suffice for one and a half to two and a half of them.
    engine = Engine(GoldenExecutor(num_pages=num_pages), tokenizer, EngineOptions(prefix_cache=False))
    together = run(engine, *(GenerationRequest(name, ids, params) for name, ids in prompts.items()))
    assert engine.counters().preemptions > 0
    for name, ids in prompts.items():
        assert len(together[name]) == 200
        assert tokens(together[name]) == solo(ids, params, tokenizer), name


def test_preempted_requests_go_before_those_that_never_ran(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    engine = Engine(GoldenExecutor(num_pages=4), tokenizer, EngineOptions(prefix_cache=False))
    for index in range(5):
        engine.add(GenerationRequest(f"r{index}", prompt(20, index), params))
    finished = []
    while engine.has_work:
        finished += [event.request_id for event in engine.step() if event.finish_reason]
    assert engine.counters().preemptions > 0
    assert finished == ["r0", "r1", "r2", "r3", "r4"]


def test_preempted_request_keeps_its_random_stream(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=11, ignore_eos=True)
    requests = [GenerationRequest(f"r{index}", prompt(20, index), params) for index in range(3)]
    engine = Engine(GoldenExecutor(num_pages=3), tokenizer)
    together = run(engine, *requests)
    assert engine.counters().preemptions > 0
    for request in requests:
        assert tokens(together[request.request_id]) == solo(request.prompt_ids, params, tokenizer)


def test_case_22_same_prompt_twice_hits_exactly_its_full_pages(tokenizer: Tokenizer) -> None:
    for length, pages in ((127, 0), (128, 0), (129, 1), (256, 1), (257, 2), (300, 2)):
        ids = prompt(length, length)
        engine = Engine(GoldenExecutor(), tokenizer)
        first = run(engine, GenerationRequest("a", ids, GREEDY_8))["a"]
        assert engine.counters().prefix_hit_tokens == 0
        second = run(engine, GenerationRequest("b", ids, GREEDY_8))["b"]
        assert engine.counters().prefix_hit_tokens == pages * PAGE_TOKENS, length
        assert second[0].cached_tokens == pages * PAGE_TOKENS
        assert tokens(first) == tokens(second) == solo(ids, GREEDY_8, tokenizer)


def test_case_22_prompts_that_differ_in_the_last_token_of_a_page(tokenizer: Tokenizer) -> None:
    ids = prompt(300)
    other = (*ids[:127], (ids[127] + 1) % 300, *ids[128:])
    engine = Engine(GoldenExecutor(), tokenizer)
    run(engine, GenerationRequest("a", ids, GREEDY_8))
    second = run(engine, GenerationRequest("b", other, GREEDY_8))["b"]
    assert engine.counters().prefix_hit_tokens == 0
    assert tokens(second) == solo(other, GREEDY_8, tokenizer)


def test_case_22_equal_pages_after_different_ones_are_told_apart(tokenizer: Tokenizer) -> None:
    tail = prompt(140, 3)
    prompts = [(*prompt(128, seed), *tail) for seed in (1, 2)]
    engine = Engine(GoldenExecutor(), tokenizer)
    for ids in prompts:
        run(engine, GenerationRequest("a", ids, GREEDY_8))
    assert engine.counters().prefix_hit_tokens == 0
    for ids in prompts:
        before = engine.counters().prefix_hit_tokens
        assert tokens(run(engine, GenerationRequest("b", ids, GREEDY_8))["b"]) == solo(ids, GREEDY_8, tokenizer)
        assert engine.counters().prefix_hit_tokens - before == 2 * PAGE_TOKENS


def test_case_22_abort_during_prefill_publishes_only_what_was_computed(tokenizer: Tokenizer) -> None:
    ids = prompt(400)
    engine = Engine(GoldenExecutor(), tokenizer, EngineOptions(max_batch_tokens=200))
    engine.add(GenerationRequest("a", ids, GREEDY_8))
    engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    assert is_idle(engine.counters())
    again = run(engine, GenerationRequest("b", ids, GREEDY_8))["b"]
    assert engine.counters().prefix_hit_tokens == PAGE_TOKENS, "200 computed tokens confirm one page, not two or three"
    assert engine.counters().requests_aborted == 1
    assert tokens(again) == solo(ids, GREEDY_8, tokenizer)


def test_failed_forward_publishes_nothing(tokenizer: Tokenizer) -> None:
    def fail(batch: Sequence[Chunk]) -> None:
        raise ExecutorError("device lost")

    engine = Engine(GoldenExecutor(before_forward=fail), tokenizer)
    sequence_ids = prompt(300)
    engine.add(GenerationRequest("a", sequence_ids, GREEDY_8))
    with pytest.raises(ExecutorError, match="device lost"):
        engine.step()
    engine.abort("a")
    assert engine._pool.find_prefix(EngineSequence("b", sequence_ids, GREEDY_8, 8)) == []


def test_generated_pages_serve_the_next_turn(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    ids = prompt(100)
    engine = Engine(GoldenExecutor(), tokenizer)
    answer = tokens(run(engine, GenerationRequest("a", ids, params))["a"])
    follow_up = (*ids, *answer, 7, 8)
    second = run(engine, GenerationRequest("b", follow_up, GREEDY_8))["b"]
    assert engine.counters().prefix_hit_tokens == PAGE_TOKENS
    assert tokens(second) == solo(follow_up, GREEDY_8, tokenizer)


def test_cached_pages_are_evicted_for_new_prompts_ends_first(tokenizer: Tokenizer) -> None:
    engine = Engine(GoldenExecutor(num_pages=4), tokenizer)
    first, second = prompt(384, 1), prompt(200, 2)
    run(engine, GenerationRequest("a", first, SamplingParams(max_tokens=1, temperature=0.0)))
    assert tokens(run(engine, GenerationRequest("b", second, GREEDY_8))["b"]) == solo(second, GREEDY_8, tokenizer)
    before = engine.counters().prefix_hit_tokens
    again = run(engine, GenerationRequest("c", first, GREEDY_8))["c"]
    assert engine.counters().prefix_hit_tokens - before == 2 * PAGE_TOKENS, "the third page was the one to give up"
    assert tokens(again) == solo(first, GREEDY_8, tokenizer)


def test_digest_collision_is_caught_by_comparing_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.kv_cache.chain_digest", lambda parent, token_ids: b"always the same")
    pool = PagePool(8)
    first = EngineSequence("a", prompt(130, 1), GREEDY_8, 8)
    pool.admit(first)
    first.computed_tokens = 130
    pool.publish(first)
    assert len(pool.find_prefix(EngineSequence("b", first.prompt_ids, GREEDY_8, 8))) == 1
    assert pool.find_prefix(EngineSequence("c", prompt(130, 2), GREEDY_8, 8)) == []


def test_page_digests_do_not_depend_on_the_hash_seed() -> None:
    code = "from serving.kv_cache import chain_digest; print(chain_digest(b'', range(128)).hex())"
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == chain_digest(b"", range(128)).hex()


def test_case_3_any_end_of_sequence_id_stops(tokenizer: Tokenizer) -> None:
    for stop_id in (3, 7, 5, EOS_ID):
        executor = ScriptedExecutor([70, 71, stop_id, 72])
        executor.config = GoldenExecutor(eos_token_ids=(3, 7, 5)).config
        engine = Engine(executor, tokenizer)
        assert engine.eos_token_ids == {3, 7, 5, EOS_ID}
        events = run(engine, GenerationRequest("a", (9,), SamplingParams(max_tokens=10, temperature=0.0)))["a"]
        assert tokens(events) == [70, 71, stop_id]
        assert events[-1].finish_reason == "stop"
        assert "".join(event.text for event in events) == tokenizer.decode([70, 71])


def test_case_4_ids_without_a_token_are_empty_text_and_padding_cannot_be_drawn(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([310, 70, 319]) == tokenizer.decode([70])
    assert tokenizer.token_text(310) == ""
    engine = Engine(ScriptedExecutor([310, 70, 311]), tokenizer)
    events = run(engine, GenerationRequest("a", (9,), SamplingParams(max_tokens=3, temperature=0.0)))["a"]
    assert "".join(event.text for event in events) == tokenizer.decode([70])
    logits = torch.zeros(320)
    drawn = {Sampler(SamplingParams(seed=seed, temperature=2.0)).sample(logits).token_id for seed in range(2000)}
    assert max(drawn) < 320
    assert len(drawn) > 250, "a flat distribution is drawn from as a whole"


def test_case_18_lengths(tokenizer: Tokenizer) -> None:
    engine = Engine(GoldenExecutor(num_pages=2), tokenizer)
    assert engine.max_context_tokens == 256
    greedy = SamplingParams(max_tokens=10**9, temperature=0.0, ignore_eos=True)
    events = run(engine, GenerationRequest("cap", prompt(250), greedy))["cap"]
    assert (len(events), events[-1].finish_reason) == (7, "length")
    exact = run(engine, GenerationRequest("exact", prompt(256), greedy))["exact"]
    assert (len(exact), exact[-1].finish_reason) == (1, "length")
    with pytest.raises(RequestError, match=r"257 tokens.*256"):
        engine.add(GenerationRequest("long", prompt(257), greedy))
    nothing = run(engine, GenerationRequest("zero", prompt(5), SamplingParams(max_tokens=0)))["zero"]
    assert [(event.token_id, event.text, event.finish_reason) for event in nothing] == [(None, "", "length")]
    with pytest.raises(RequestError, match="max_tokens is -1"):
        SamplingParams(max_tokens=-1)


def test_case_19_bad_ids_are_refused_by_name(tokenizer: Tokenizer) -> None:
    engine = Engine(GoldenExecutor(), tokenizer)
    for ids, pattern in (((0, 5, 10**12), "1000000000000.*0 to 319"), ((-1,), "-1.*0 to 319"), ((), "empty")):
        with pytest.raises(RequestError, match=pattern):
            engine.add(GenerationRequest("a", ids, GREEDY_8))
    assert engine.counters().requests_added == 0


def test_logits_that_are_not_finite_stop_the_engine(tokenizer: Tokenizer) -> None:
    executor = ScriptedExecutor([])
    executor.forward = lambda batch: torch.full((1, 320), float("nan"))  # type: ignore[method-assign]
    engine = Engine(executor, tokenizer)
    engine.add(GenerationRequest("a", (9,), GREEDY_8))
    with pytest.raises(ExecutorError, match="not finite"):
        engine.step()


def test_options_that_could_never_run_are_refused() -> None:
    with pytest.raises(ValueError, match="max_running=0"):
        EngineOptions(max_running=0)
    with pytest.raises(ValueError, match="max_batch_tokens=3"):
        EngineOptions(max_batch_tokens=3, max_running=4)
