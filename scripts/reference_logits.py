"""Store what Transformers computes for the tiny models of tests/unit/models/variants.py.

Needs torch and transformers, so it runs in an environment of its own and its results are kept in the repository:

    python -m venv ref && ref/bin/pip install torch transformers accelerate
    ref/bin/python scripts/reference_logits.py

Each .npz has `logits` fp32 [rows, vocab] of the prompt positions `rows`, and `greedy`, the ids Transformers goes
on with when it always takes the best one, and `versions`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.unit.models.variants import DATA, NUM_GREEDY, VARIANTS, Variant, write_weights


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
        "versions": np.array(f"torch {torch.__version__}, transformers {transformers.__version__}"),
    }


def main() -> None:
    DATA.mkdir(parents=True, exist_ok=True)
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
