"""The engine with the model people get first, and the example that shows it as a library."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from enginehouse.engine import ChatPrompt, SamplingParams
from enginehouse.engine.engine_config import DEFAULT_SOURCE
from tests.worker.conftest import StartEngine
from tests.worker.driving import ask, ask_one, eventually, idle
from tests.worker.test_worker_process import worker_of

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)


def chat(text: str) -> ChatPrompt:
    return ChatPrompt(messages=[{"role": "user", "content": text}])


def run_example(*arguments: str) -> str:
    command = [sys.executable, "examples/library.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_library_example_runs_on_any_model(tiny_int8: Path) -> None:
    assert "steps computed" in run_example(str(tiny_int8))


@pytest.mark.model
def test_the_library_example_makes_sense_on_the_default_model() -> None:
    output = run_example()
    assert "steam" in output.partition("\n\n")[0]
    assert "Tokyo" in output


@pytest.mark.model
async def test_it_knows_the_capital_of_japan(start_engine: StartEngine) -> None:
    engine = await start_engine(DEFAULT_SOURCE)
    answer = await ask_one(engine, chat("What is the capital of Japan?"), GREEDY)
    assert "Tokyo" in answer.text
    assert answer.reason == "stop"
    stopped = await ask_one(engine, chat("What is the capital of Japan?"), GREEDY, stop=("Tokyo",))
    assert stopped.text == answer.text.partition("Tokyo")[0]
    assert stopped.finished is not None
    assert stopped.finished.stop_reason == "Tokyo"


@pytest.mark.model
async def test_choices_and_logprobs(start_engine: StartEngine) -> None:
    engine = await start_engine(DEFAULT_SOURCE)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=5, prompt_logprobs=1)
    choices = await ask(engine, "The three primary colours are red,", params, n=3)
    for choice in choices:
        assert len(choice.logprobs) == len(choice.token_ids)
        for entry in choice.logprobs:
            assert entry.logprob <= 0
            assert len(entry.top) == 5
            assert sorted(entry.top, key=lambda pair: -pair[1]) == entry.top
            assert entry.logprob <= entry.top[0][1]
    assert choices[0].prompt_logprobs is not None
    assert [p is None for p in choices[0].prompt_logprobs] == [True] + [False] * (
        choices[0].prompt_tokens - 1
    )
    await idle(engine)
    assert engine.stats().forks_total == 2


@pytest.mark.model
async def test_a_killed_worker_costs_time_and_nothing_else(start_engine: StartEngine) -> None:
    engine = await start_engine(DEFAULT_SOURCE, num_threads=2)
    prompts = [chat(f"Tell me {count} facts about the number {count}.") for count in range(2, 7)]
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=5)
    undisturbed = await asyncio.gather(*(ask_one(engine, prompt, params) for prompt in prompts))
    running = asyncio.gather(*(ask_one(engine, prompt, params) for prompt in prompts))
    steps = engine.stats().steps_total
    await eventually(lambda: engine.stats().steps_total > steps + 15, "they are under way")
    worker_of(engine).kill()
    assert [a.output() for a in await running] == [a.output() for a in undisturbed]
    assert engine.health().restarts_total == 1
