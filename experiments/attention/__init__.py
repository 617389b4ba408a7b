"""Attention that decides what to read, against attention to everything."""
