"""Metrics and logs; imported by all, imports none."""
