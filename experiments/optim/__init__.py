"""Optimizers and gradient transformations against their baselines."""
