"""Text with something to learn: an order-1 chain whose transitions are few and unequal."""

import numpy as np


def markov_text(steps: int, rows: int, length: int, vocab_size: int = 32, seed: int = 0) -> np.ndarray:
    """Token ids (steps, rows, length), int32."""
    rng = np.random.default_rng(seed)
    chain = np.cumsum(rng.dirichlet(np.full(vocab_size, 0.1), size=vocab_size), axis=1)
    tokens = np.zeros((steps, rows, length), np.int32)
    tokens[..., 0] = rng.integers(0, vocab_size, (steps, rows))
    for i in range(1, length):
        draws = rng.random((steps, rows, 1))
        tokens[..., i] = np.minimum((chain[tokens[..., i - 1]] < draws).sum(-1), vocab_size - 1)
    return tokens
