"""What the tests of decoding attention share: sequences with their true history, and attention over it in float64."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import ragged_decode_attention
from kernels_pallas.ragged_decode_attention import cache as caches
from kernels_pallas.ragged_decode_attention.cache import init_cache

DIM = 8
KINDS = {
    "mixed": (True, False, False, True),
    "full": (True, True),
    "compressed": (False, False, False),
    "one": (False, True),
}
STATICS = ("head_kind", "n_sink", "n_recent", "implementation")
attend = jax.jit(inspect.unwrap(ragged_decode_attention), static_argnames=STATICS)
append = jax.jit(caches.append, static_argnames=("head_kind", "n_sink"))


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


class History:
    """What sequences really contain, and where their pages lie."""

    def __init__(self, kinds, lengths, *, page_size=4, max_pages=6, group=2, dim=DIM, seed=0):
        self.rng = np.random.default_rng(seed)
        self.kinds, self.group, self.dim = kinds, group, dim
        self.lengths = np.asarray(lengths, np.int32)
        self.batch = len(lengths)
        most = page_size * max_pages
        self.key, self.value = (normal(self.rng, self.batch, most, len(kinds), dim) for _ in range(2))
        pages = self.batch * max_pages + 2
        self.num_pages, self.page_size = pages, page_size
        self.table = self.rng.permutation(pages)[: self.batch * max_pages].reshape(self.batch, -1).astype(np.int32)

    def query(self, rows=1, dtype=jnp.float32):
        return jnp.asarray(normal(self.rng, self.batch, rows, self.group * len(self.kinds), self.dim), dtype)

    def empty(self, *, n_sink, n_recent, rows=1, dtype=jnp.float32):
        return init_cache(
            head_kind=self.kinds,
            dim=self.dim,
            batch=self.batch,
            num_pages=self.num_pages,
            page_size=self.page_size,
            n_sink=n_sink,
            n_recent=n_recent,
            rows=rows,
            dtype=dtype,
        )

    def append(self, cache, n_sink, lengths, counts):
        """Writes `counts` tokens of every sequence behind the first `lengths`."""
        most = self.key.shape[1]
        rows = 4 if counts.max() <= 4 else most  # two shapes, to compile seldom
        at = np.minimum(lengths[:, None] + np.arange(rows), most - 1)[..., None, None]
        key, value = (jnp.asarray(np.take_along_axis(x, at, axis=1)) for x in (self.key, self.value))
        table = jnp.asarray(self.table)
        return append(
            cache,
            key,
            value,
            head_kind=self.kinds,
            lengths=jnp.asarray(lengths),
            page_table=table,
            n_sink=n_sink,
            counts=jnp.asarray(counts),
        )

    def filled(self, *, n_sink, n_recent, rows=1, dtype=jnp.float32):
        """All tokens, as two appends: a prompt and the rest."""
        cache = self.empty(n_sink=n_sink, n_recent=n_recent, rows=rows, dtype=dtype)
        prompt = self.lengths // 2
        cache = self.append(cache, n_sink, 0 * prompt, prompt)
        return self.append(cache, n_sink, prompt, self.lengths - prompt)

    def attention(self, query, n_sink, n_recent, scale=DIM**-0.5, key=None, value=None):
        """softmax(scale q kᵀ) v in float64, one sequence, row and head after the other."""
        key, value = (
            np.asarray(x, np.float64)
            for x in (self.key if key is None else key, self.value if value is None else value)
        )
        query = np.asarray(query.astype(jnp.float32), np.float64)
        out = np.zeros(query.shape)
        for b, row, h in np.ndindex(query.shape[:3]):
            t = self.lengths[b] - query.shape[1] + row
            g = h // self.group
            s = np.arange(t + 1)
            if not self.kinds[g]:
                s = s[(s < n_sink) | (t - s < n_recent)]
            if len(s):
                scores = scale * key[b, s, g] @ query[b, row, h]
                weights = np.exp(scores - scores.max())
                out[b, row, h] = weights @ value[b, s, g] / weights.sum()
        return out


def call(history, cache, query, implementation=None, **budget):
    return attend(
        query,
        cache,
        jnp.asarray(history.lengths),
        jnp.asarray(history.table),
        head_kind=history.kinds,
        implementation=implementation,
        **budget,
    )
