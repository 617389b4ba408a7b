"""A small real experiment: how often does a seeded fair coin fall on heads?"""

from collections.abc import Mapping
from typing import Any

import jax
from matplotlib.figure import Figure

from experiments.context import Context
from experiments.protocol import Claim, Experiment, Outcome, at_least, at_most, between


def run(context: Context) -> Outcome:
    throws = context.pick(smoke=10, laptop=1000, full=2000)
    shares = []
    with context.progress("throwing", total=len(context.seeds)) as phase:
        for seed in context.seeds:
            heads = jax.random.bernoulli(jax.random.key(seed), shape=(throws,))
            shares.append(heads.mean())
            phase.advance(share=float(shares[-1]))
    context.log(f"{throws} throws per seed")
    return Outcome(
        measured={"half": shares, "never": shares, "certain": shares, "large": 1.0},
        data={"share": jax.numpy.stack(shares), "throws": throws},
        notes=("The coin is a random number generator.",),
    )


def plot(figure: Figure, data: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    axes.plot(data["share"], "o")
    axes.axhline(0.5)


EXPERIMENT = Experiment(
    name="coins/fair",
    title="A fair coin",
    paper="Bernoulli, Ars Conjectandi",
    claims=(
        Claim("half", "Half of the throws | heads", "0.5", between(0.45, 0.55), judged_on="every seed"),
        Claim("never", "No heads at all", "", at_most(0.1, "heads")),
        Claim("certain", "All heads at full scale", "1", {"full": at_least(1.0, "heads")}),
        Claim("large", "One [1]", "1", at_least(1.0)),
    ),
    run=run,
    plot=plot,
    seeds=2,
    accepts_data=False,
)
