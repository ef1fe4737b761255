"""What a person sees while an engine starts: one bar a stage, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginehouse.engine import LLMEngine
    from enginehouse.engine.llm_engine import OnProgress
    from enginehouse.settings import Settings

STAGE_TEXTS = {"download": "Fetching weights", "pack": "Packing weights", "load": "Loading"}


@contextmanager
def stage_bars() -> Iterator[OnProgress]:
    """Gives a callback (stage, fraction) that draws a bar for each stage; it may be called from any thread.

    Without a terminal it prints a line when a stage begins and one when it ends.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<18}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def on_progress(stage: str, fraction: float) -> None:
            text = STAGE_TEXTS.get(stage, stage)
            if stage not in tasks:
                tasks[stage] = progress.add_task(text, total=1.0)
                if not console.is_terminal:
                    print(f"{text} …", file=sys.stderr, flush=True)
            progress.update(tasks[stage], completed=fraction)

        yield on_progress
        for task in tasks.values():
            progress.update(task, completed=1.0)


async def start_engine(settings: Settings) -> LLMEngine:
    """An engine for these settings, with bars while it comes up. Raises as `LLMEngine.start` does."""
    from enginehouse.api.engine_host import engine_config
    from enginehouse.engine import LLMEngine

    with stage_bars() as on_progress:
        return await LLMEngine.start(engine_config(settings), on_progress=on_progress)
