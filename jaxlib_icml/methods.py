"""The registry of methods: which paper, how to import it, where it is reproduced, how far it is.

The README's method table is generated from here by `python -m experiments report`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
      name: `<family>/<method>`, the method's address.
      import_path: Dotted path of what a user imports.
      paper: The paper's title.
      arxiv: Its arXiv id; empty where none is known.
      experiment: Name of the experiment that puts it against a baseline; empty for none yet.
      status: What is there and what is not, in a few words.
    """

    name: str
    import_path: str
    paper: str
    arxiv: str
    experiment: str
    status: str


METHODS: tuple[Method, ...] = (
    Method(
        name="attention/l2a",
        import_path="jaxlib_icml.attention.L2AAttention",
        paper="Learning When to Attend: Conditional Memory Access for Long-Context LLMs",
        arxiv="2603.17484",
        experiment="attention/l2a",
        status="layer, conversion, training, decoding and pruning, in the language model too; recalls as full "
        "attention does with 1.5 % of the tokens routed; pruning at ε = 0.02 then loses the recall, at 0.01 not",
    ),
    Method(
        name="moe/growth",
        import_path="jaxlib_icml.moe.growth.apply_growth",
        paper="Beyond Sunk Costs: Boosting LLM Pre-training Efficiency via Orthogonal Growth of Mixture-of-Experts",
        arxiv="2510.08008",
        experiment="moe/growth",
        status="both operators for parameters and optimizer states, `icml grow`; a grown model beats one from scratch "
        "at equal further and at equal total compute, the more so the later; noise and new experts make no difference "
        "here",
    ),
    Method(
        name="moe/layers",
        import_path="jaxlib_icml.moe.SparseMoE",
        paper="Hyperparameter Transfer with Mixture-of-Experts Layers",
        arxiv="2601.20205",
        experiment="lm/pretrain",
        status="the layer with its gates, balancing, three paths on one device, and experts spread over many",
    ),
    Method(
        name="moe/parameterization",
        import_path="jaxlib_icml.moe.transfer_optimizer",
        paper="Hyperparameter Transfer with Mixture-of-Experts Layers",
        arxiv="2601.20205",
        experiment="moe/parameterization",
        status="rules as data, optimizer (Adam, OLion, Muon), initial values, mean-field quantities, coordinate check, "
        "sweeps, `icml train --parameterization`; the best rate stays the same octave over width, depth and experts",
    ),
    Method(
        name="moe/prism_moe",
        import_path="jaxlib_icml.moe.prism_convert.convert_ffn",
        paper="Prism-MoE: Efficient Dense-to-MoE Conversion for Visual Autoregressive Generation",
        arxiv="",
        experiment="moe/prism_moe",
        status="conversion, repair, losses and fine-tuning, `icml convert-moe`; on text, 37.5 % of the units come "
        "within 2 % of the dense loss after a tenth of its steps, random splits and pruning do not; images are to come",
    ),
    Method(
        name="optim/gradient_stabilizer",
        import_path="jaxlib_icml.gradient_stabilizer",
        paper="GradientStabilizer: Fix the Norm, Not the Gradient",
        arxiv="2502.17055",
        experiment="optim/gradient_stabilizer",
        status="complete transformation; beats no protection in FP4, FP16 and under L2; AGC does better in FP4 and "
        "FP16, norm clipping in front of SGD and Lion",
    ),
    Method(
        name="optim/olion",
        import_path="jaxlib_icml.olion",
        paper="OLion: Approaching the Hadamard Ideal by Intersecting Spectral and l_inf Implicit Biases",
        arxiv="2602.01105",
        experiment="optim/olion",
        status="complete optimizer; far below AdamW and Lion on a small byte model, level with Muon beside equal AdamW",
    ),
)


def method_table() -> str:
    """Returns the methods as a Markdown table.

    >>> method_table().splitlines()[0]
    '| method | import | paper | experiment | status |'
    """
    rows = [
        (
            f"`{method.name}`",
            f"`{method.import_path}`",
            f"[{method.paper}](https://arxiv.org/abs/{method.arxiv})" if method.arxiv else method.paper,
            f"`{method.experiment}`" if method.experiment else "–",
            method.status,
        )
        for method in METHODS
    ]
    lines = [("method", "import", "paper", "experiment", "status"), ("---",) * 5, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
