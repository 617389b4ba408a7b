"""Taking the global attention away from L2A layers that hardly use it."""

import dataclasses
from pathlib import Path

import numpy as np
from flax import nnx

from jaxlib_icml.attention.l2a_pruning import prune_layers
from jaxlib_icml.lm import abstract_transformer
from jaxlib_icml.training.corpus import load_corpus
from jaxlib_icml.training.evaluate import routing_usage
from jaxlib_icml.training.runs import LoadedRun, load_run, new_folder, read_config, save_model, write_run


def prune_run(
    path: str | Path, out: str | Path, *, data: str | None = None, eps: float = 0.02, max_drop: float = 0.5
) -> tuple[LoadedRun, np.ndarray]:
    """Write a run in which the L2A layers that hardly use their global attention have lost it.

    Args:
      path: the folder of a run with L2A.
      out: a new folder, for a run with the same weights.
      data: text that usage is measured on; None: what the run held out.
      eps: layers that route at most this share of the tokens may go.
      max_drop: largest share of the layers that go.

    Returns:
      The pruned model, and the usage of every layer.

    Raises:
      ValueError: a run without L2A or with scanned layers, no text, or a folder that is in use.
    """
    out = new_folder(out, "out")
    run, config = load_run(path), read_config(Path(path))
    if run.config.scan_layers:
        raise ValueError("run: its layers are scanned, and all of them must be alike")
    held_out_fraction = config.held_out_fraction if data is None else 0.0
    corpus = load_corpus(data or config.data, held_out_fraction=held_out_fraction, text_field=config.text_field)
    documents = corpus.train if data is not None else corpus.held_out
    if not documents:
        raise ValueError("data: the run held nothing out; name a text")
    tokens = run.tokenizer.encode_batch([document.text for document in documents])
    usage = routing_usage(run.graphdef, run.state, tokens, eos_id=run.tokenizer.eos_id, start_id=run.tokenizer.start_id)
    chosen = prune_layers(usage, eps, max_drop)
    pruned = tuple(i for i, drop in enumerate(chosen) if drop or i in run.config.pruned_layers)
    model = dataclasses.replace(run.config, pruned_layers=pruned)
    result = run._replace(config=model, graphdef=nnx.split(abstract_transformer(model))[0])
    new = dataclasses.replace(config, model=model, init_from=str(path))
    write_run(out, new, run.tokenizer, lambda checkpointer: save_model(checkpointer, result))
    return result, usage
