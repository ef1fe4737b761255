"""What grammars cost: compiling ten schemas as people write them, a mask, and a decoding step.

python bench/structured.py [--steps] [--rounds 3]

Compile times are those of a schema never seen before: in the API process over bytes, and in the worker over the
default model's vocabulary. Mask times are for every token of an example answer, from the request for a mask to the
array of banned tokens, and for following the token. `--steps` also compares decoding speed with and without a
grammar, alternately, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from enginehouse.engine import EngineConfig, Finished, LLMEngine, SamplingParams
from enginehouse.engine.engine_loading import load_model
from enginehouse.engine.messages import AddSequence, SequenceId
from enginehouse.engine.sequence import SampledToken, Sequence
from enginehouse.engine.step import SampleRow
from enginehouse.engine.structured_output import Grammar
from enginehouse.engine.structured_output_check import GrammarChecker
from enginehouse.engine.structured_output_matchers import GrammarMatchers

SCHEMAS = Path(__file__).parent / "data" / "schemas.json"
ANY_TEXT = Grammar(kind="regex", text="[ -~\n]+")


class Walk:
    """One sequence that is led through an example answer."""

    def __init__(self, number: int, schema: Any, tokens: list[int]) -> None:
        grammar = Grammar(kind="json_schema", text=json.dumps(schema))
        self.message = AddSequence(
            sequence_id=SequenceId(number),
            prompt_tokens=[1],
            params=SamplingParams(grammar=grammar, max_tokens=1000, eos_token_ids=(2,)),
        )
        self.tokens = tokens
        self.sequence = Sequence.from_message(self.message, 0.0)


def prepare(matchers: GrammarMatchers, walk: Walk) -> float:
    """Seconds until the sequence may be queued."""
    start_s = time.perf_counter()
    matchers.prepare(walk.message)
    while not (ready := matchers.take_ready()):
        time.sleep(0.00005)
    assert ready[0].error is None, ready[0].error
    return time.perf_counter() - start_s


def lead(matchers: GrammarMatchers, walks: list[Walk]) -> tuple[list[float], list[float]]:
    """Seconds of each mask and of each following, per row, until the shortest example ends."""
    masks_s, follows_s = [], []
    for tokens in zip(*(walk.tokens for walk in walks), strict=False):
        rows = [SampleRow(walk.sequence, 0) for walk in walks]
        start_s = time.perf_counter()
        matchers.start(rows)
        banned = matchers.masks()
        masked_s = time.perf_counter()
        assert banned is not None
        assert not any(mask[token] for mask, token in zip(banned, tokens, strict=True))  # type: ignore[index]
        samples: list[Any] = [SampledToken(token) for token in tokens]
        follow_since_s = time.perf_counter()
        results = matchers.advance(rows, samples)
        follows_s.append((time.perf_counter() - follow_since_s) / len(rows))
        masks_s.append((masked_s - start_s) / len(rows))
        assert all(isinstance(result, SampledToken) for result in results)
        for walk, token in zip(walks, tokens, strict=True):
            walk.sequence.append(token)
    return masks_s, follows_s


def compile_and_masks(console: Console) -> None:
    """The table of schemas."""
    model = load_model(EngineConfig(), None)
    examples = json.loads(SCHEMAS.read_text())
    checker = GrammarChecker()
    matchers = GrammarMatchers(str(model.path), model.config.vocab_size, lambda: None)
    warm_up = Walk(1, {"const": 1}, [])
    asyncio.run(checker.check(warm_up.message.params.grammar or ANY_TEXT))
    console.print(f"first grammar of a worker (vocabulary read): {prepare(matchers, warm_up) * 1e3:.0f} ms")
    table = Table("schema", "check ms", "compile ms", "again ms", "tokens", "mask µs", "worst", "follow µs")
    walks, all_masks = [], []
    for number, (name, entry) in enumerate(examples.items(), 2):
        text = json.dumps(entry["example"], ensure_ascii=False)
        tokens = model.tokenizer.encode(text, add_special=False)
        walk, again = Walk(number, entry["schema"], tokens), Walk(100 + number, entry["schema"], tokens)
        start_s = time.perf_counter()
        asyncio.run(checker.check(walk.message.params.grammar or ANY_TEXT))
        check_s = time.perf_counter() - start_s
        compile_s, again_s = prepare(matchers, walk), prepare(matchers, again)
        masks_s, follows_s = lead(matchers, [walk])
        walks.append(again)
        all_masks += masks_s
        row = [check_s * 1e3, compile_s * 1e3, again_s * 1e3]
        costs = [statistics.median(masks_s) * 1e6, max(masks_s) * 1e6, statistics.median(follows_s) * 1e6]
        table.add_row(
            name, *(f"{value:.2f}" for value in row), str(len(tokens)), *(f"{cost:.0f}" for cost in costs)
        )
    console.print(table)
    console.print(f"mask, all tokens: median {statistics.median(all_masks) * 1e6:.0f} µs, ", end="")
    console.print(f"mean {statistics.mean(all_masks) * 1e6:.0f} µs")
    masks_s, follows_s = lead(matchers, walks)
    console.print(
        f"ten rows in one step, lexers warm: {statistics.median(masks_s) * 1e6:.0f} µs a mask, "
        f"{statistics.median(follows_s) * 1e6:.0f} µs to follow"
    )


async def decode_speed(engine: LLMEngine, grammar: Grammar | None, batch: int, num_tokens: int) -> float:
    """Tokens a second of `batch` sequences together, prompts not counted."""

    async def run(seed: int) -> Finished:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed, grammar=grammar)
        async for event in engine.generate("Once upon a time", params):
            if isinstance(event, Finished):
                return event
        raise RuntimeError("the stream had no end")

    ends = await asyncio.gather(*(run(seed) for seed in range(batch)))
    span_s = max(end.timing.finished_s for end in ends) - min(end.timing.first_token_s for end in ends)
    return batch * (num_tokens - 1) / span_s


async def steps(console: Console, rounds: int) -> None:
    """Decoding with a grammar against free text."""
    engine = await LLMEngine.start(EngineConfig())
    try:
        for grammar in (None, ANY_TEXT):
            await decode_speed(engine, grammar, 2, 8)
        for batch in (1, 16):
            free, bound = [], []
            for _ in range(rounds):
                free.append(await decode_speed(engine, None, batch, 64))
                bound.append(await decode_speed(engine, ANY_TEXT, batch, 64))
            ratio = statistics.median(f / b for f, b in zip(free, bound, strict=True))
            console.print(
                f"batch {batch}: free {statistics.median(free):.0f} tok/s, with a grammar "
                f"{statistics.median(bound):.0f} tok/s; a step takes {(ratio - 1) * 100:+.1f} %"
            )
    finally:
        await engine.close()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", action="store_true", help="also compare decoding speed")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=120)
    compile_and_masks(console)
    if options.steps:
        asyncio.run(steps(console, options.rounds))


if __name__ == "__main__":
    main()
