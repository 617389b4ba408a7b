"""Reproductions of the papers: `python -m experiments list|run|report|bench`.

An experiment is a module `experiments/<family>/<method>.py` that declares one object, `EXPERIMENT`; see
`experiments.protocol` for what it says and `experiments.context` for what it is given.
"""
