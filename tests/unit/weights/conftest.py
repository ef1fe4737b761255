from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test, so that none sees what another left or what the user has."""
    path = tmp_path / "cache"
    monkeypatch.setenv("ENGINEHOUSE_CACHE", str(path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return path
