"""Agents: what systems around language models are built from."""

from jaxlib_icml.agents.embed import MiniLM, MiniLMConfig

__all__ = ["MiniLM", "MiniLMConfig"]
