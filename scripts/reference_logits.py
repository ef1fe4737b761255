"""Store what Transformers computes for the tiny models of tests/unit/models/variants.py, and for the default model.

Needs torch and transformers, so it runs in an environment of its own and its results are kept in the repository:

    python -m venv ref && ref/bin/pip install torch transformers accelerate
    ref/bin/python scripts/reference_logits.py
    ref/bin/python scripts/reference_logits.py --default-model SmolLM2-135M-Instruct.Q4_1.gguf

Each .npz of a tiny model has `logits` fp32 [rows, vocab] of the prompt positions `rows`, and `greedy`, the ids Transformers goes
on with when it always takes the best one, and `versions`. That of the default model has `tokens` (a prompt and its
answer), and at each of `rows` the 48 best `ids` with their `logits`, and `log_sum` (of the exponentials of all).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.unit.models.variants import DATA, NUM_GREEDY, VARIANTS, Variant, write_weights

VERSIONS = np.array(f"torch {torch.__version__}, transformers {transformers.__version__}")


def load(variant: Variant, directory: Path) -> torch.nn.Module:
    (directory / "config.json").write_text(json.dumps(variant.config))
    write_weights(variant, directory / "model.safetensors")
    model, loaded = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {name: keys for name, keys in loaded.items() if keys}
    if problems:
        raise SystemExit(f"{variant.name}: the weights do not fit the model: {problems}")
    return model.eval()


@torch.no_grad()
def reference(variant: Variant) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as directory:
        model = load(variant, Path(directory))
    tokens = torch.tensor([variant.prompt()])
    rows = variant.logit_rows()
    logits = model(tokens).logits[0, rows].numpy()
    greedy: list[int] = []
    for _ in range(NUM_GREEDY):
        last = model(tokens).logits[0, -1]
        best, second = (float(value) for value in last.topk(2).values)
        if best - second < 1e-3:
            raise SystemExit(f"{variant.name}: greedy token {len(greedy)} is a near tie; choose another seed")
        greedy.append(int(last.argmax()))
        tokens = torch.cat([tokens, tokens.new_tensor([[greedy[-1]]])], dim=1)
    return {
        "logits": logits.astype(np.float32),
        "rows": np.array(rows, np.int32),
        "greedy": np.array(greedy, np.int32),
        "versions": VERSIONS,
    }


@torch.no_grad()
def default_model_reference(gguf: Path) -> dict[str, np.ndarray]:
    location = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(**location)
    prose = (Path(__file__).resolve().parents[1] / "bench/data/prose.txt").read_text(encoding="utf-8")
    question = "What is the capital of France? Answer briefly."
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    tokens = tokenizer(prose)["input_ids"][:256]
    logits = model.eval()(torch.tensor([tokens])).logits[0]
    rows = [0, 1, 31, 32, 100, 200, 255]
    best = logits[rows].topk(48)
    answer = model.generate(torch.tensor([prompt["input_ids"]]), max_new_tokens=16, do_sample=False)[0]
    return {
        "tokens": np.array(tokens, np.int32),
        "rows": np.array(rows, np.int32),
        "ids": best.indices.numpy().astype(np.int32),
        "logits": best.values.numpy(),
        "log_sum": logits.logsumexp(-1)[rows].numpy(),
        "prompt": np.array(prompt["input_ids"], np.int32),
        "greedy": answer[len(prompt["input_ids"]) :].numpy().astype(np.int32),
        "versions": VERSIONS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--default-model", type=Path, help="the default model's .gguf file")
    arguments = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    if arguments.default_model:
        np.savez_compressed(DATA / "default-model.npz", **default_model_reference(arguments.default_model))
        return
    for variant in VARIANTS:
        result = reference(variant)
        path = DATA / f"{variant.name}.npz"
        np.savez_compressed(path, **result)
        spread = float(result["logits"].std())
        distinct = len(set(result["greedy"].tolist()))
        print(
            f"{variant.name:32} {path.stat().st_size:7} bytes, logits' spread {spread:.2f}, {distinct} greedy ids"
        )


if __name__ == "__main__":
    main()
