"""Store what sentence-transformers computes for the tiny encoders of tests/support/tiny_encoders.py, and for the
default embedding model.

Needs sentence-transformers, so it runs in an environment of its own and its results are kept in the repository:

    python -m venv ref && ref/bin/pip install sentence-transformers
    ref/bin/python scripts/reference_embeddings.py
    ref/bin/python scripts/reference_embeddings.py --default-model DIRECTORY

Each .npz has `vectors` fp32 [texts, dimensions] of `TEXTS`, or for a cross-encoder `logits` fp32 [texts] of each with
`QUERY`, the lengths in tokens that the model saw (`lengths`), and `versions`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.tiny_encoders import DATA, ENCODERS, QUERY, TEXTS, TinyEncoder, write_tiny_encoder

VERSIONS = np.array(
    f"torch {torch.__version__}, transformers {transformers.__version__}, "
    f"sentence-transformers {sentence_transformers.__version__}"
)


def vectors(directory: Path, texts: list[str]) -> dict[str, np.ndarray]:
    model = SentenceTransformer(str(directory), device="cpu")
    lengths = [int(model.tokenize([text])["attention_mask"].sum()) for text in texts]
    return {
        "vectors": model.encode(texts, batch_size=len(texts)).astype(np.float32),
        "lengths": np.array(lengths, np.int32),
        "versions": VERSIONS,
    }


def logits(encoder: TinyEncoder, directory: Path) -> dict[str, np.ndarray]:
    model = CrossEncoder(
        str(directory), device="cpu", max_length=encoder.config["max_position_embeddings"] - 2
    )
    pairs = [(QUERY, text) for text in TEXTS]
    scores = model.predict(pairs, activation_fn=torch.nn.Identity())
    lengths = [len(model.tokenizer(*pair)["input_ids"]) for pair in pairs]
    return {
        "logits": np.asarray(scores, np.float32).reshape(-1),
        "lengths": np.array(lengths, np.int32),
        "versions": VERSIONS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--default-model", type=Path, help="the default embedding model's directory")
    arguments = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    if arguments.default_model:
        prose = (Path(__file__).resolve().parents[1] / "bench/data/prose.txt").read_text(encoding="utf-8")
        result = vectors(arguments.default_model, [*TEXTS, prose[:900], "日本語 and émojis 🙂 mixed"])
        np.savez_compressed(DATA / "default-model.npz", **result)
        print(result["lengths"], result["vectors"][:, 0])
        return
    for encoder in ENCODERS:
        with tempfile.TemporaryDirectory() as name:
            directory = write_tiny_encoder(encoder, Path(name))
            result = logits(encoder, directory) if encoder.is_cross_encoder else vectors(directory, TEXTS)
        path = DATA / f"{encoder.name}.npz"
        np.savez_compressed(path, **result)
        values = result.get("vectors", result.get("logits"))
        print(
            f"{encoder.name:24} {path.stat().st_size} bytes, spread {values.std(axis=0).mean():.3f}, {result['lengths']}"
        )


if __name__ == "__main__":
    main()
