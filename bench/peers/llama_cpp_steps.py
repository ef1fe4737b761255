"""Raw step speed of llama.cpp through llama-cpp-python's low-level API: no server, no sampling.

Runs in its own virtual environment (pip install llama-cpp-python); prints one JSON line shaped like the one of
`bench/steps.py`, so that `bench/compare.py` can alternate the two.

    python bench/peers/llama_cpp_steps.py MODEL.gguf --contexts 32,512
    python bench/peers/llama_cpp_steps.py --quantize q8_0 SOURCE.gguf TARGET.gguf
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time

import llama_cpp as llama
import numpy as np

FILE_TYPES = {"q4_0": 2, "q8_0": 7}


def quantize(kind: str, source: str, target: str) -> None:
    """Write `source` again with every matrix in block type `kind`."""
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = FILE_TYPES[kind], True, 2
    if llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not quantize {source}")


def open_context(path: str, threads: int, num_tokens: int) -> llama.llama_context_p:
    """A context for 32 sequences with one shared KV cache of `num_tokens` tokens."""
    llama.llama_log_set(_SILENT, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = num_tokens, 512, 512, 32
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = True
    return llama.llama_init_from_model(model, params)


@llama.llama_log_callback
def _SILENT(level: int, text: bytes, data: object) -> None:  # noqa: N802
    pass


def decode(
    ctx: llama.llama_context_p, tokens: list[int], positions: list[int], sequences: list[int], last: bool
) -> None:
    """One forward pass; `last` asks for logits of the final row only, otherwise of every row."""
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, positions[i], 1
        batch.seq_id[i][0], batch.logits[i] = sequences[i], not last or i == len(tokens) - 1
    status = llama.llama_decode(ctx, batch)
    llama.llama_batch_free(batch)
    if status:
        raise SystemExit(f"llama_decode failed with {status}")
    llama.llama_synchronize(ctx)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("target", nargs="?")
    parser.add_argument("--quantize", choices=sorted(FILE_TYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", default="32")
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    if args.quantize:
        return quantize(args.quantize, args.model, args.target)
    contexts = [int(c) for c in args.contexts.split(",")]
    batches = [int(b) for b in args.batches.split(",")]
    ctx = open_context(args.model, args.threads, max(batches) * (max(contexts) + args.steps + 32) + 512)
    memory = llama.llama_get_memory(ctx)
    rng = np.random.default_rng(0)

    def random_tokens(n: int) -> list[int]:
        return [int(t) for t in rng.integers(100, 40000, n)]

    prefill = []
    for _ in range(3):
        llama.llama_memory_clear(memory, True)
        start = time.perf_counter()
        decode(ctx, random_tokens(512), list(range(512)), [0] * 512, last=True)
        prefill.append(512 / (time.perf_counter() - start))
    result: dict[str, object] = {"engine": "llama.cpp", "prefill 512": round(statistics.median(prefill), 1)}
    for context in contexts:
        for batch in batches:
            llama.llama_memory_clear(memory, True)
            for s in range(batch):
                for begin in range(0, context, 512):
                    n = min(512, context - begin)
                    decode(ctx, random_tokens(n), list(range(begin, begin + n)), [s] * n, last=True)
            times = []
            for k in range(args.steps):
                start = time.perf_counter()
                decode(ctx, random_tokens(batch), [context + k] * batch, list(range(batch)), last=False)
                times.append(time.perf_counter() - start)
            result[f"decode b{batch} c{context}"] = round(batch / statistics.median(times), 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
