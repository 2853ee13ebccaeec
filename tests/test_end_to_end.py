"""The whole job on the real sample model, when it has been fetched (`make sample`)."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from serving.launch import launched_worker
from tests.flows.support import run_json

SAMPLE = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SAMPLE.is_dir(), reason="the sample model has not been fetched: make sample"),
]


def test_the_sample_model_is_released_and_answers(tmp_path: Path) -> None:
    store = tmp_path / "store"
    question = "What is the capital of France?"
    answer = run_json("release", str(SAMPLE), "--store", str(store), "--name", "sample", "--ask", question)
    assert answer["promoted"] is True
    assert answer["quality"]["perplexity_ratio"] < 1.1
    assert {program["name"]: program["status"] for program in answer["programs"]} == {
        "decode_layer": "READY",
        "lm_head_greedy": "READY",
    }
    (asked,) = answer["answers"]
    assert asked["prompt"] == question
    assert "Paris" in asked["answer"]

    again = run_json("release", str(SAMPLE), "--store", str(store), "--name", "sample")
    assert again["digest"] == answer["digest"]
    assert again["tpot"] == answer["tpot"]

    with launched_worker(store, "champion") as worker:
        client = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none")
        stream = client.chat.completions.create(
            model="sample",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=64,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == asked["answer"]
    assert (Path(answer["path"]) / "checkpoint" / "tokenizer.json").is_file()
    assert AutoTokenizer.from_pretrained(Path(answer["path"]) / "checkpoint").chat_template
