"""Works at scale smoke and fails in the middle at scale laptop; takes data."""

from experiments.context import Context
from experiments.protocol import Claim, Experiment, Outcome, at_most


def run(context: Context) -> Outcome:
    scratch = context.scratch / "half-way.txt"
    scratch.write_text(context.data or "nothing", encoding="utf-8")
    if context.scale == "laptop":
        raise RuntimeError("out of coins")
    return Outcome({"size": float(scratch.stat().st_size)})


EXPERIMENT = Experiment(
    name="coins/broken",
    title="A coin that breaks",
    paper="none",
    claims=(Claim("size", "The name is short", "", at_most(1000)),),
    run=run,
    plot=lambda figure, data: None,
    accepts_data=True,
)
