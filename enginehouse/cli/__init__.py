"""Command line: thin commands over the engine and the API."""
