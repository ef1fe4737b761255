"""Where models come from: parsing their names, fetching them once, and remembering what was fetched."""

from enginehouse.runtime.sources.cache import Progress, cache_dir, ignore_progress
from enginehouse.runtime.sources.fetch import fetch_source
from enginehouse.runtime.sources.locations import (
    ALIASES,
    HubSource,
    LocalSource,
    PyPISource,
    Source,
    parse_source,
)

__all__ = [
    "ALIASES",
    "HubSource",
    "LocalSource",
    "Progress",
    "PyPISource",
    "Source",
    "cache_dir",
    "fetch_source",
    "ignore_progress",
    "parse_source",
]
