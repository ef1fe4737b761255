"""Speed of the kernels on a model's shapes, for each instruction set this machine can run.

    python bench/kernels.py [--isas avx2,avx512vnni] [--threads 2] [--rows 1,8,512] [--precision int8]

Prints int8 GOPS (two operations a multiply-add) of all linear layers of SmolLM2-135M at several row counts, the
gigabytes of weights read a second at one row beside a plain read of the same bytes, attention times, and the cost of
an empty call. Every figure is the best of several repetitions: other work on the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from enginehouse.runtime.ops import AttentionBatch, LinearWeight, NativeOps, Tensor, build
from enginehouse.runtime.quantization import Precision

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 576, 1536, 9, 3, 64, 30, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
LAYER_SHAPES = [(QKV, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * FFN, HIDDEN), (HIDDEN, FFN)]

clock = time.perf_counter
"""With one thread: time on the processor, which a busy machine disturbs less."""


def best_time_s(call: Callable[[], None], budget_s: float = 0.4) -> float:
    """The shortest of as many runs as fit in the budget, at least three."""
    call()
    best, spent, runs = float("inf"), 0.0, 0
    while spent < budget_s or runs < 3:
        start = clock()
        call()
        elapsed = clock() - start
        best, spent, runs = min(best, elapsed), spent + elapsed, runs + 1
    return best


def model_weights(precision: Precision) -> list[LinearWeight]:
    """All layers' weights, each with its own memory: they must not stay in a cache that the real ones overflow."""
    rng = np.random.default_rng(0)
    shapes = LAYER_SHAPES * LAYERS
    return [
        LinearWeight.from_float(rng.standard_normal(shape, dtype=np.float32), precision) for shape in shapes
    ]


def bench_linear(ops: NativeOps, weights: list[LinearWeight], rows: int) -> float:
    """Seconds for all layers' linear layers once."""
    precision = weights[0].precision
    inputs = {k: ops.activation(rows, k, precision) for k in (HIDDEN, FFN)}
    for width, activation in inputs.items():
        x = ops.tensor(rows, width)
        x.array[:] = np.random.default_rng(1).standard_normal(x.array.shape, dtype=np.float32)
        ops.prepare(x, activation, rows)
    outputs = {w.out_features: ops.tensor(rows, w.out_features) for w in weights}

    def run() -> None:
        for weight in weights:
            ops.linear(inputs[weight.in_features], weight, outputs[weight.out_features], rows)

    return best_time_s(run)


def bench_attention(ops: NativeOps, sequences: int, context: int, rows_each: int, dtype: str) -> float:
    """Seconds of one layer's attention: each sequence's last `rows_each` tokens look back over `context`."""
    blocks = -(-context // 32)
    kv = ops.kv_cache(1, sequences * blocks, KV_HEADS, HEAD_DIM, dtype).layers[0]
    rng = np.random.default_rng(0)
    kv.k[:] = rng.standard_normal(kv.k.shape, dtype=np.float32)
    kv.v[:] = rng.standard_normal(kv.v.shape, dtype=np.float32)
    rows = sequences * rows_each
    qkv, out = ops.tensor(rows, QKV), ops.tensor(rows, HEADS * HEAD_DIM)
    qkv.array[:] = rng.standard_normal(qkv.array.shape, dtype=np.float32)
    batch = AttentionBatch(
        np.repeat(np.arange(sequences, dtype=np.int32), rows_each),
        np.tile(np.arange(context - rows_each, context, dtype=np.int32), sequences),
        rng.permutation(sequences * blocks).astype(np.int32).reshape(sequences, blocks),
    )
    return best_time_s(lambda: ops.attention(qkv, kv, batch, HEAD_DIM**-0.5, out, HEADS, rows))


def read_gigabytes_s(weights: list[LinearWeight]) -> float:
    """What one thread of plain summing reaches on the same arrays."""
    views = [weight.data.reshape(-1).view(np.uint64) for weight in weights]
    size = sum(view.nbytes for view in views)
    return size / best_time_s(lambda: [view.sum() for view in views] and None) / 1e9


def report(ops: NativeOps, weights: list[LinearWeight], row_counts: list[int], with_others: bool) -> None:
    """Print what one instruction set reaches."""
    size = sum(weight.data.nbytes for weight in weights)
    multiply_adds = sum(weight.out_features * weight.in_features for weight in weights)
    print(f"\n{ops.name}, {ops.num_threads} threads, {weights[0].precision}")
    for rows in row_counts:
        seconds = bench_linear(ops, weights, rows)
        print(
            f"  linear layers, {rows:4d} rows: {seconds * 1e3:8.2f} ms  {2 * rows * multiply_adds / seconds / 1e9:7.1f}"
            f" GOPS  {size / seconds / 1e9:6.1f} GB/s of weights"
        )
    if with_others:
        report_others(ops)


def report_others(ops: NativeOps) -> None:
    """Attention, the smallest call and the row operations."""
    for dtype in ("fp16", "fp32"):
        for sequences, context, rows_each in ((1, 512, 1), (32, 512, 1), (1, 512, 512), (1, 2048, 512)):
            seconds = bench_attention(ops, sequences, context, rows_each, dtype)
            print(
                f"  attention {dtype}, {sequences:2d} sequences of {context}, {rows_each:3d} rows each: "
                f"{seconds * 1e6:8.1f} us a layer"
            )
    x, out = Tensor(1, HIDDEN), ops.activation(1, HIDDEN, "int8")
    print(
        f"  smallest call (quantise one row): {best_time_s(lambda: ops.prepare(x, out, 1), 0.05) * 1e6:.2f} us"
    )
    for rows in (1, 32, 512):
        x, out, norm = (
            Tensor(rows, 2 * FFN),
            ops.activation(rows, FFN, "int8"),
            ops.activation(rows, HIDDEN, "int8"),
        )
        hidden, weight = Tensor(rows, HIDDEN), np.ones(HIDDEN, np.float32)
        x.array[:], hidden.array[:] = 0.3, 0.7
        silu = best_time_s(lambda: ops.silu_mul(x, out, rows), 0.1)  # noqa: B023
        rms = best_time_s(lambda: ops.rms_norm(hidden, weight, 1e-5, norm, rows), 0.1)  # noqa: B023
        print(f"  {rows:3d} rows: silu_mul {silu * 1e6:.1f} us, rms_norm {rms * 1e6:.1f} us")


def main() -> None:
    """Parse the arguments and report on every instruction set asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isas", default=",".join(build.runnable_isas()))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,4,8,16,32,128,512")
    parser.add_argument("--precision", choices=["int8", "fp32"], default="int8")
    parser.add_argument("--only-linear", action="store_true", help="leave attention and row operations out")
    arguments = parser.parse_args()
    if arguments.threads == 1:
        global clock
        clock = time.thread_time
    weights = model_weights(arguments.precision)
    print(f"plain read of the weights, one thread: {read_gigabytes_s(weights):.1f} GB/s")
    for isa in arguments.isas.split(","):
        rows = [int(n) for n in arguments.rows.split(",")]
        report(NativeOps(arguments.threads, isa), weights, rows, with_others=not arguments.only_linear)


if __name__ == "__main__":
    main()
