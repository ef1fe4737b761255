"""Answers that follow a grammar, from a model that has never seen one: a tiny random one at temperature 1."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginehouse.engine import LLMEngine, SamplingParams
from enginehouse.engine.engine_config import DEFAULT_SOURCE
from enginehouse.engine.messages import (
    AbortSequences,
    AddSequence,
    Command,
    SequenceId,
    Shutdown,
    StepReport,
)
from enginehouse.engine.structured_output import Grammar, GrammarKind
from enginehouse.errors import InvalidRequestError
from tests.support.json_schemas import Schema, satisfies, schemas
from tests.support.tiny_models import EOS_TOKEN_ID, SPECIAL_TOKENS
from tests.worker.conftest import StartEngine
from tests.worker.driving import Answer, ask, ask_one, eventually, idle, read
from tests.worker.test_worker_loop import Bench

PROMPT = [7, 8, 9, 40, 41]
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y", "long one"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def grammar(kind: GrammarKind, text: Any = "") -> Grammar:
    return Grammar(kind=kind, text=text if isinstance(text, str) else json.dumps(text))


def sampled(rule: Grammar | None, seed: int = 1, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 300, "temperature": 1.0, "seed": seed, "grammar": rule, **changes})


def ends_well(answer: Answer, schema: Schema) -> bool:
    """Whether the answer is finished; then it must be right."""
    if answer.reason == "length":
        return False
    assert answer.reason == "stop"
    assert satisfies(json.loads(answer.text), schema), (answer.text, schema)
    return True


async def test_random_schemas(start_engine: StartEngine) -> None:
    engine = await start_engine()
    loop = asyncio.get_running_loop()
    finished: list[bool] = []

    @given(schema=schemas, seed=st.integers(0, 2**31), greedy=st.booleans())
    @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def every_finished_answer_validates(schema: Schema, seed: int, greedy: bool) -> None:
        params = sampled(grammar("json_schema", schema), seed, temperature=0.0 if greedy else 1.0)
        answer = asyncio.run_coroutine_threadsafe(ask_one(engine, PROMPT, params), loop).result(60)
        finished.append(ends_well(answer, schema))

    await asyncio.to_thread(every_finished_answer_validates)
    assert sum(finished) > 0.8 * len(finished), "too few answers came to an end to show anything"


async def test_json_object(start_engine: StartEngine) -> None:
    engine = await start_engine()
    answers = await asyncio.gather(
        *(
            ask_one(engine, PROMPT, sampled(grammar("json_object"), seed, max_tokens=400))
            for seed in range(12)
        )
    )
    for answer in answers:
        assert answer.text.startswith("{")
        if answer.reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
    assert any(answer.reason == "stop" for answer in answers)


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        (grammar("regex", "[a-c]{3,6}x?"), "[a-c]{3,6}x?"),
        (grammar("regex", "(é|日本|🎉){2}"), "(é|日本|🎉){2}"),
        (grammar("choice", ["yes", "no", "yes, please"]), "yes|no|yes, please"),
        (grammar("choice", ["a.b", "(c)", "d|e", "\\", "\n", '"', "-"]), r'a\.b|\(c\)|d\|e|\\|\n|"|-'),
        (grammar("lark", 'start: item ("," item)~2\nitem: "x" | "yy" | NUMBER\nNUMBER: /[0-9]{2}/'), None),
    ],
)
async def test_other_grammars(start_engine: StartEngine, rule: Grammar, pattern: str | None) -> None:
    engine = await start_engine()
    expected = pattern or r"(x|yy|\d\d)(,(x|yy|\d\d)){2}"
    answers = [await ask_one(engine, PROMPT, sampled(rule, seed)) for seed in range(6)]
    for answer in answers:
        assert answer.reason == "stop"
        assert re.fullmatch(expected, answer.text), answer.text
    assert len({answer.text for answer in answers}) > 1


# --- where it ends -----------------------------------------------------------------------------------------


async def test_the_last_token_of_a_complete_grammar_ends_the_output(start_engine: StartEngine) -> None:
    engine = await start_engine()
    rule = grammar("regex", "[ab]{4}")
    for changes in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"max_tokens": 4}):
        answer = await ask_one(engine, PROMPT, sampled(rule, **changes))
        assert answer.reason == "stop"
        assert len(answer.text) == 4
        assert len(answer.token_ids) <= 4
        assert EOS_TOKEN_ID not in answer.token_ids


async def test_an_open_grammar_ends_with_eos_or_goes_on(start_engine: StartEngine) -> None:
    engine = await start_engine()
    rule = grammar("regex", "[a-z ]+")
    eos_wanted = {"logit_bias": {EOS_TOKEN_ID: 100.0}}
    early = await ask_one(engine, PROMPT, sampled(rule, **eos_wanted))
    assert early.reason == "stop"
    assert early.token_ids[-1] == EOS_TOKEN_ID
    assert len(early.token_ids) == 2
    later = await ask_one(engine, PROMPT, sampled(rule, min_tokens=9, **eos_wanted))
    assert len(later.token_ids) == 10
    assert later.reason == "stop"
    never = await ask_one(engine, PROMPT, sampled(rule, ignore_eos=True, max_tokens=30, **eos_wanted))
    assert never.reason == "length"
    assert len(never.token_ids) == 30
    assert re.fullmatch("[a-z ]+", never.text)
    other = await ask_one(engine, PROMPT, sampled(rule, stop_token_ids=(3,), logit_bias={3: 100.0}))
    assert other.reason == "stop"
    assert other.finished is not None
    assert other.finished.stop_reason == 3


async def test_special_tokens_are_never_part_of_it(start_engine: StartEngine) -> None:
    engine = await start_engine()
    bias = dict.fromkeys(range(len(SPECIAL_TOKENS)), 100.0)
    answer = await ask_one(engine, PROMPT, sampled(grammar("regex", "(?s:.{40})"), logit_bias=bias))
    assert len(answer.text) == 40
    assert min(answer.token_ids) >= len(SPECIAL_TOKENS)


async def test_a_special_token_that_a_grammar_of_ours_names(start_engine: StartEngine) -> None:
    engine = await start_engine()
    rule = Grammar(kind="lark", text='start: <[3]> "ab" | "x"', special_tokens=(3,))
    answer = await ask_one(engine, PROMPT, sampled(rule, logit_bias={3: 100.0, 1: 100.0}))
    assert answer.token_ids[0] == 3
    assert answer.text == "ab"
    assert answer.reason == "stop"


async def test_cut_by_max_tokens_and_by_a_stop_string(start_engine: StartEngine) -> None:
    engine = await start_engine()
    params = sampled(grammar("json_schema", PERSON), max_tokens=5)
    cut = await ask_one(engine, PROMPT, params)
    assert cut.reason == "length"
    assert len(cut.token_ids) == 5
    stopped = await ask_one(engine, PROMPT, sampled(grammar("json_schema", PERSON)), stop=('"age"',))
    assert stopped.reason == "stop"
    assert '"age"' not in stopped.text


async def test_white_space_cannot_go_on_for_ever(start_engine: StartEngine) -> None:
    engine = await start_engine()
    space = {token: 100.0 for token in range(engine.tokenizer.vocab_size) if blank(engine, token)}
    answer = await ask_one(engine, PROMPT, sampled(grammar("json_schema", PERSON), logit_bias=space))
    assert ends_well(answer, PERSON)
    assert "\n" not in answer.text


def blank(engine: LLMEngine, token: int) -> bool:
    data = engine.tokenizer.token_bytes(token)
    return bool(data) and not data.strip()


async def test_log_probabilities_are_the_models_own(start_engine: StartEngine) -> None:
    engine = await start_engine()
    rule = grammar("regex", "[ab]{6}")
    answer = await ask_one(engine, PROMPT, sampled(rule, logprobs=2, temperature=0.0))
    first = answer.logprobs[0]
    free = await ask_one(engine, PROMPT, sampled(None, logprobs=2, max_tokens=1, temperature=0.0))
    assert first.top == free.logprobs[0].top, "alternatives are what the model would have said"
    assert first.logprob <= first.top[0][1]


# --- the same tokens, whatever happens ---------------------------------------------------------------------


def mixed_work() -> list[SamplingParams]:
    rules = [
        grammar("json_schema", PERSON),
        None,
        grammar("regex", "[a-z]{5,60}"),
        grammar("choice", ["alpha", "beta", "alphabet soup"]),
        grammar("json_object"),
        grammar("lark", 'start: ("ab" | "cd")~20'),
        grammar(
            "json_schema", {"type": "array", "items": {"type": "boolean"}, "minItems": 20, "maxItems": 20}
        ),
        None,
    ]
    return [
        sampled(rules[i % 8], i, max_tokens=90, temperature=(0.0, 1.0, 0.7)[i % 3], logprobs=(None, 2)[i % 2])
        for i in range(16)
    ]


def prompt_of(number: int) -> list[int]:
    return [10 + number, *range(50, 60 + 3 * number)]


async def lone_runs(start_engine: StartEngine) -> list[tuple[Any, ...]]:
    engine = await start_engine(strategy="one-at-a-time", prefix_cache=False)
    return [
        (await ask_one(engine, prompt_of(number), params)).output()
        for number, params in enumerate(mixed_work())
    ]


async def test_a_mixed_batch_equals_lone_runs(start_engine: StartEngine) -> None:
    expected = await lone_runs(start_engine)
    engine = await start_engine()
    for _ in range(2):
        answers = await asyncio.gather(
            *(ask_one(engine, prompt_of(number), params) for number, params in enumerate(mixed_work()))
        )
        assert [answer.output() for answer in answers] == expected


async def test_preemption_changes_nothing(start_engine: StartEngine) -> None:
    expected = await lone_runs(start_engine)
    engine = await start_engine()
    running = [
        asyncio.create_task(ask_one(engine, prompt_of(number), params))
        for number, params in enumerate(mixed_work())
    ]
    while not all(task.done() for task in running):
        engine.preempt()
        await asyncio.sleep(0.005)
    assert engine.stats().preemptions_total > 0
    assert [task.result().output() for task in running] == expected


async def test_a_killed_worker_goes_on_with_the_same_tokens(start_engine: StartEngine) -> None:
    expected = await lone_runs(start_engine)
    engine = await start_engine()
    streams = [await engine.submit(prompt_of(number), params) for number, params in enumerate(mixed_work())]
    reading = [asyncio.create_task(read(stream)) for stream in streams]
    await eventually(lambda: engine.stats().steps_total >= 8, "some tokens are out")
    pid = engine.health().worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    answers = [(await task)[0].output() for task in reading]
    assert engine.health().resumed_sequences_total > 0
    assert answers == expected
    await eventually(lambda: engine.health().state == "ready", "a new worker")


async def test_forks_follow_the_grammar_each_on_its_own(start_engine: StartEngine) -> None:
    engine = await start_engine()
    params = sampled(grammar("json_schema", PERSON))
    together = await ask(engine, PROMPT, params, n=6)
    assert len({answer.text for answer in together}) > 1
    for index, answer in enumerate(together):
        assert ends_well(answer, PERSON)
        alone = await ask_one(engine, PROMPT, msgspec.structs.replace(params, seed=1 + index))
        assert alone.output() == answer.output()


# --- faults ------------------------------------------------------------------------------------------------


REFUSED: list[tuple[GrammarKind, Any]] = [
    ("json_schema", "{"),
    ("json_schema", {"type": "objet"}),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}),
    ("json_schema", {"enum": []}),
    ("json_schema", "false"),
    ("json_schema", {"$ref": "#/$defs/missing"}),
    ("json_schema", {"$ref": "https://example.com/schema"}),
    ("json_schema", {"$ref": "#"}),
    ("json_schema", {"type": "array", "uniqueItems": True}),
    (
        "json_schema",
        {"type": "object", "properties": {"a": True, "b": {"$ref": "#"}}, "required": ["a", "b"]},
    ),
    ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    ("regex", "[a"),
    ("regex", "(?=a)b"),
    ("regex", "[^\\s\\S]"),
    ("regex", "(" * 20000 + "a" + ")" * 20000),
    ("regex", "a" * 200_000),
    ("choice", "[1]"),
    ("lark", "nonsense"),
    ("lark", 'start: "a" other'),
    ("lark", "start: <|im_end|>"),
    ("lark", "start: <[2]>"),
    ("lark", "start: " + "(" * 20000 + '"a"' + ")" * 20000),
]


async def test_refused_before_anything_runs(start_engine: StartEngine) -> None:
    engine = await start_engine()
    for kind, text in REFUSED:
        rule = msgspec.structs.replace(grammar(kind, text), param="field")
        with pytest.raises(InvalidRequestError) as refusal:
            await engine.submit(PROMPT, sampled(rule))
        assert refusal.value.param == "field", text
        assert len(str(refusal.value)) < 500, text
    assert engine.health().num_unfinished == 0
    assert engine.stats().steps_total == 0


@pytest.mark.parametrize(
    "rule",
    [
        grammar("lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(6000)) + '\nr6000: "ab"'),
        grammar("regex", "(a|aa)+" * 50 + "b{3}"),
        grammar("regex", "((a{50}){50}){50}"),
        grammar("lark", 'start: "a" start'),
        grammar("lark", 'start: e\ne: e e | "a"'),
        grammar("lark", 'start: "a" x\nx: x "b"'),
    ],
)
async def test_what_is_costly_or_endless_hurts_nobody_else(start_engine: StartEngine, rule: Grammar) -> None:
    engine = await start_engine()
    work = [ask_one(engine, PROMPT, sampled(None, seed, max_tokens=40)) for seed in range(3)]
    hostile = engine.submit(PROMPT, sampled(rule, max_tokens=40))
    friend = ask_one(engine, PROMPT, sampled(grammar("choice", ["left", "right"])))
    *answers, outcome, friendly = await asyncio.gather(*work, hostile, friend, return_exceptions=True)
    assert all(isinstance(answer, Answer) for answer in answers)
    assert isinstance(friendly, Answer)
    assert friendly.text in ("left", "right")
    if not isinstance(outcome, InvalidRequestError):
        assert not isinstance(outcome, BaseException), outcome
        async with outcome:
            await asyncio.gather(read(outcome), return_exceptions=True)
    assert engine.health().restarts_total == 0


async def test_abort_while_the_grammar_compiles(start_engine: StartEngine) -> None:
    engine = await start_engine()
    # The first grammar of a worker waits for its vocabulary, so these are all still compiling.
    streams = [
        await engine.submit(PROMPT, sampled(grammar("regex", f"[a-z]{{{n},400}}")), n=3) for n in range(1, 6)
    ]
    for stream in streams[:-1]:
        stream.abort()
    answers = await read(streams[-1])
    assert all(re.fullmatch("[a-z]{5,400}", answer.text) for answer in answers)
    await idle(engine)


def test_the_worker_forgets_what_ended_and_what_was_aborted(tiny_int8: Path) -> None:
    bench = Bench(tiny_int8)
    params = sampled(grammar("regex", "[a-z]{5,9}"))
    wanted = {SequenceId(number) for number in (1, 2, 4)}
    commands: list[Command] = [
        AddSequence(sequence_id=SequenceId(1), prompt_tokens=PROMPT, params=params),
        AddSequence(
            sequence_id=SequenceId(2),
            prompt_tokens=PROMPT,
            params=params,
            sibling_ids=[SequenceId(3), SequenceId(4)],
        ),
        AddSequence(sequence_id=SequenceId(5), prompt_tokens=PROMPT, params=params),
        # All of them are still with the compiler: what is ready is taken after the commands.
        AbortSequences(sequence_ids=[SequenceId(3), SequenceId(5), SequenceId(99)]),
    ]
    finished: set[SequenceId] = set()
    told: set[SequenceId] = set()

    def script(steps: list[StepReport]) -> list[Command]:
        for output in (output for step in steps for output in step.outputs):
            told.add(output.sequence_id)
            if output.finish_reason is not None:
                finished.add(output.sequence_id)
        if finished >= wanted:
            return [Shutdown()]
        time.sleep(0.001)
        return [commands.pop(0) for _ in list(commands)]

    bench.channel.script = script
    bench.worker.run()
    assert told == finished == wanted
    assert bench.worker._grammars._followers == {}
    assert bench.worker._grammars._compiling == {}


@pytest.mark.model
async def test_the_default_model_fills_a_schema(start_engine: StartEngine) -> None:
    engine = await start_engine(DEFAULT_SOURCE)
    prompt = "Anna is 31 years old and likes to swim and to read. As JSON: "
    params = sampled(grammar("json_schema", PERSON), temperature=0.0)
    assert ends_well(await ask_one(engine, prompt, params), PERSON)
