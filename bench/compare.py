"""Ratios of raw step speed against a peer: both run alternately on this machine, medians are compared.

python bench/compare.py --peer "/path/to/venv/bin/python bench/peers/llama_cpp_steps.py smol_q8_0.gguf"
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

OURS = [sys.executable, str(Path(__file__).parent / "steps.py")]


def measure(command: list[str], options: list[str]) -> dict[str, float]:
    """The figures of one run of a program that prints one JSON line."""
    done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    figures.pop("engine")
    return dict(figures)


def main() -> None:
    """Alternate, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="command that prints a line like the one of steps.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contexts", default="32,512")
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    options = ["--contexts", args.contexts, "--batches", args.batches, "--threads", args.threads]
    ours, peer = [], []
    for _ in range(args.rounds):
        ours.append(measure(OURS, options))
        peer.append(measure(shlex.split(args.peer), options))
    rows = {}
    for name in ours[0]:
        mine, theirs = (statistics.median(run[name] for run in runs) for runs in (ours, peer))
        rows[name] = {"enginehouse": mine, "peer": theirs, "ratio": round(mine / theirs, 2)}
    if args.as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("tokens/s", "enginehouse", "peer", "ratio")
    for name, row in rows.items():
        table.add_row(name, f"{row['enginehouse']:.0f}", f"{row['peer']:.0f}", f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
