"""Weights, tokenisers, model code and kernels."""
