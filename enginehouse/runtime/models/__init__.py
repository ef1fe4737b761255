"""Architectures, one short file each."""
