"""Paired benchmarks: two things timed in one process, and the ratio kept.

A benchmark is a module here that declares one object, `BENCHMARK` (see `experiments.benchmarks.protocol`),
and measures with `experiments.benchmarks.timing.paired_times`; `python -m experiments bench NAME` runs it.
"""
