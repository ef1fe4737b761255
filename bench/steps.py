"""Raw step speed of the native engine: no server, no sampling, random prompts.

Prints one JSON line: prefill tokens/s, and decode tokens/s by batch size and context.

    python bench/steps.py --contexts 32,512
    python bench/steps.py --model hf:ORG/NAME --precision fp32 --threads 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from enginehouse.engine.engine_config import DEFAULT_SOURCE
from enginehouse.engine.model_runner import Chunk, ModelRunner, build_batch
from enginehouse.runtime import ops
from enginehouse.runtime.packed import open_packed
from enginehouse.runtime.weights import prepare_model

BLOCK = ops.BLOCK


class Driver:
    """Sequences of random tokens, each with its own blocks, computed directly by the model runner."""

    def __init__(self, runner: ModelRunner, vocab_size: int, blocks_each: int) -> None:
        self.runner, self.blocks_each = runner, blocks_each
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size

    def step(self, sequences: list[int], start: int, count: int) -> float:
        """Compute `count` tokens at position `start` of each sequence; returns seconds."""
        chunks = [
            Chunk(
                tokens=self._rng.integers(100, self._vocab_size - 100, count).tolist(),
                start=start,
                block_table=range(s * self.blocks_each, (s + 1) * self.blocks_each),
            )
            for s in sequences
        ]
        begin = time.perf_counter()
        self.runner.run(build_batch(chunks))
        return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_SOURCE)
    parser.add_argument("--precision", default="int8", choices=["int8", "fp32"])
    parser.add_argument("--kv-dtype", default="fp16", choices=["fp16", "fp32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", default="32")
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    contexts = [int(c) for c in args.contexts.split(",")]
    batches = [int(b) for b in args.batches.split(",")]
    packed = open_packed(prepare_model(args.model, args.precision).path)
    blocks_each = -(-(max(*contexts, 512) + args.steps) // BLOCK)
    runner = ModelRunner(
        packed,
        ops.load(args.threads, "native"),
        num_blocks=max(batches) * blocks_each,
        kv_dtype=args.kv_dtype,
        max_rows=512,
        max_seqs=max(batches),
    )
    driver = Driver(runner, packed.config.vocab_size, blocks_each)
    driver.step([0], 0, 512)
    prefill = [512 / driver.step([0], 0, 512) for _ in range(3)]
    result: dict[str, object] = {"engine": "enginehouse", "prefill 512": round(statistics.median(prefill), 1)}
    for context in contexts:
        for batch in batches:
            sequences = list(range(batch))
            for s in sequences:
                driver.step([s], 0, context)
            times = [driver.step(sequences, context + k, 1) for k in range(args.steps)]
            result[f"decode b{batch} c{context}"] = round(batch / statistics.median(times), 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
