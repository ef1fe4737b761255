"""Enginehouse serves language models behind one HTTP API."""

__version__ = "0.1.0"
