"""What the precisions cost: perplexity and KL divergence against the same weights in fp32 with an fp32 KV cache.

Each text is read once as one sequence; every position predicts the next token. Models of all modes walk through
the text together, a chunk at a time, so that the memory needed does not grow with the text.

    python bench/quality.py
    python bench/quality.py --model hf:ORG/NAME --tokens 2048 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginehouse.engine.engine_config import DEFAULT_SOURCE
from enginehouse.engine.model_runner import Chunk, ModelRunner, build_batch
from enginehouse.runtime import ops
from enginehouse.runtime.config import KVDtype
from enginehouse.runtime.packed import open_packed
from enginehouse.runtime.quantization import Precision
from enginehouse.runtime.tokenizer import Tokenizer
from enginehouse.runtime.weights import prepare_model

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {
    "prose": ROOT / "bench/data/prose.txt",
    "licence": ROOT / "LICENSE",
    "code": ROOT / "bench/data/code.txt",
}
MODES: list[tuple[Precision, KVDtype]] = [
    ("fp32", "fp32"),
    ("fp32", "fp16"),
    ("int8", "fp32"),
    ("int8", "fp16"),
]
CHUNK_TOKENS = 128
LIMIT_PERCENT = 1.0
"""The int8 precision must not add more perplexity than this."""


@dataclass(slots=True)
class Score:
    """Sums over the positions of one text."""

    num_tokens: int = 0
    loss: float = 0.0
    """Negative log-likelihood of the text, nats."""
    divergence: float = 0.0
    """KL(fp32 || this mode), nats."""
    same_best: int = 0
    """Positions where the most likely token is fp32's."""

    def add(
        self, log_probs: NDArray[np.float64], base: NDArray[np.float64], targets: NDArray[np.int64]
    ) -> None:
        """Adds positions: log-probabilities [rows, vocab] of this mode and of fp32, the tokens that follow."""
        rows = np.arange(len(targets))
        self.num_tokens += len(targets)
        self.loss -= float(log_probs[rows, targets].sum())
        self.divergence += float((np.exp(base) * (base - log_probs)).sum())
        self.same_best += int((log_probs.argmax(axis=1) == base.argmax(axis=1)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return float(np.exp(self.loss / self.num_tokens))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of logits [rows, vocab]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def measure(runners: Sequence[ModelRunner], tokens: Sequence[int]) -> list[Score]:
    """One score for each runner; the first is what the others are compared with."""
    scores = [Score() for _ in runners]
    for start in range(0, len(tokens) - 1, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(tokens) - 1)
        targets = np.array(tokens[start + 1 : end + 1], np.int64)
        blocks = range(-(-end // ops.BLOCK))
        batch = build_batch([Chunk(tokens[start:end], start, blocks, "all")])
        base = log_softmax(runners[0].run(batch))
        for index, (runner, score) in enumerate(zip(runners, scores, strict=True)):
            score.add(base if index == 0 else log_softmax(runner.run(batch)), base, targets)
    return scores


def build_runners(source: str, num_tokens: int, threads: int, kernels: ops.Kernels) -> list[ModelRunner]:
    """One runner for each of `MODES`, on weights of the same source."""
    operations = ops.load(threads, kernels)
    return [
        ModelRunner(
            open_packed(prepare_model(source, precision).path),
            operations,
            num_blocks=-(-num_tokens // ops.BLOCK),
            kv_dtype=kv_dtype,
            max_rows=CHUNK_TOKENS,
            max_seqs=1,
        )
        for precision, kv_dtype in MODES
    ]


def print_table(rows: list[dict[str, object]]) -> None:
    """A Markdown table."""
    print("| text (tokens) | weights | KV | perplexity | against fp32 | KL, nats | same best token |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['text']} ({row['tokens']}) | {row['precision']} | {row['kv_dtype']} | {row['perplexity']:.4f} "
            f"| {row['change_percent']:+.2f} % | {row['kl_nats']:.5f} | {row['same_best_percent']:.1f} % |"
        )


def main() -> int:
    """Measures and prints; exit code 1 when int8 misses its limit on a text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_SOURCE)
    parser.add_argument("--tokens", type=int, default=2304, help="longest part of a text that is read")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", choices=["auto", "native", "numpy"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    runners = build_runners(args.model, args.tokens, args.threads, args.kernels)
    tokenizer = Tokenizer.load(prepare_model(args.model, "fp32").path)
    rows: list[dict[str, object]] = []
    missed = False
    for name, path in TEXTS.items():
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"))[: args.tokens]
        scores = measure(runners, tokens)
        for (precision, kv_dtype), score in zip(MODES, scores, strict=True):
            change = 100 * (score.perplexity / scores[0].perplexity - 1)
            missed |= precision == "int8" and change > LIMIT_PERCENT
            rows.append(
                {
                    "text": name,
                    "tokens": score.num_tokens,
                    "precision": precision,
                    "kv_dtype": kv_dtype,
                    "perplexity": score.perplexity,
                    "change_percent": change,
                    "kl_nats": score.divergence / score.num_tokens,
                    "same_best_percent": 100 * score.same_best / score.num_tokens,
                }
            )
    if args.json:
        print(json.dumps({"model": args.model, "kernels": runners[0].ops.name, "rows": rows}))
    else:
        print_table(rows)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
