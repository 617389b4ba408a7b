"""One training run from text to a finished folder."""

import dataclasses
import json
import signal
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxlib_icml.attention import CAPACITY_RATES, CapacityLadderState, capacity_ladder, routing_temperature
from jaxlib_icml.lm import LMConfig, Sampling, generate, pad_prompts
from jaxlib_icml.lm.ngram import WittenBellNGram
from jaxlib_icml.lm.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from jaxlib_icml.optim import (
    ScaleByOlionState,
    find_states,
    olion_run_metrics,
)
from jaxlib_icml.training.checkpoints import Checkpointer, from_named_arrays, named_arrays
from jaxlib_icml.training.config import TrainConfig
from jaxlib_icml.training.corpus import Corpus, load_corpus
from jaxlib_icml.training.data import BatchIterator, bits_per_byte, make_loader
from jaxlib_icml.training.evaluate import total_nats
from jaxlib_icml.training.mesh import batch_sharding, batch_shards, make_mesh
from jaxlib_icml.training.metrics import MetricsWriter, SpikeDetector, plot_loss
from jaxlib_icml.training.optimizers import learning_rate_at, make_optimizer
from jaxlib_icml.training.progress import Progress, Reporter
from jaxlib_icml.training.runs import (
    LoadedRun,
    RunFolder,
    has_checkpoint,
    load_model,
    model_config,
    write_text,
)
from jaxlib_icml.training.step import (
    StepMetrics,
    TrainProgram,
    TrainState,
    make_train_program,
    restore_state,
    save_state,
)
from jaxlib_icml.training.transfer import BASE_FILE, Transfer, base_text, transferred

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NGRAM_ORDERS = (4, 6)
_NGRAM_MAX_BYTES = 200_000_000
_MONITOR_BYTES = 60_000
_SAMPLE_PROMPT_BYTES = 80


class RunResult(NamedTuple):
    """What a finished run reports."""

    run_dir: Path
    steps: int
    held_out_bits_per_byte: float
    ngram_bits_per_byte: dict[int, float]
    """Order -> bits per byte of the byte n-gram model fitted on the same training files."""
    samples: list[str]
    skipped_steps: int


class Interrupted(Exception):
    """The run was stopped by SIGINT or SIGTERM, after saving a checkpoint."""


class _StopSignals:
    """Turns the first SIGINT or SIGTERM into a request to stop between two steps; a second one acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._request) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: object) -> None:
        self.requested = True
        self.__exit__()


def train(config: TrainConfig, reporter: Reporter | None = None) -> RunResult:
    """Train a language model, or continue a run.

    The run folder gets `config.json`, `tokenizer/`, `checkpoints/`, `metrics.jsonl`, TensorBoard events, `loss.png`,
    `samples.txt`, with a parameterization `base.json`, and, when the run is over, `result.json`. A folder that already
    holds the same run is continued from its newest checkpoint. `metrics.jsonl` also says how the optimizer fares:
    `stabilizer_*`, every step's norms and spikes (`stabilizer_run_metrics`), and `olion_*`, every `diagnose_every`
    steps, means over four of its matrices, others each time (`olion_run_metrics`).

    Args:
      config: the whole run.
      reporter: shows progress; None: silence.

    Returns:
      `RunResult`.

    Raises:
      ValueError: bad configuration, data or run folder; nothing was trained.
      Interrupted: on SIGINT or SIGTERM, after a checkpoint.
    """
    reporter = reporter or Reporter()
    run_dir = Path(config.run_dir or _new_run_dir(config))
    config, transfer = transferred(config, run_dir)
    corpus = load_corpus(config.data, held_out_fraction=config.held_out_fraction, text_field=config.text_field)
    mesh = make_mesh(config.mesh)
    if config.batch_size // config.accumulation_steps % batch_shards(mesh):
        raise ValueError(
            f"batch_size: {config.batch_size} in {config.accumulation_steps} micro-batches does not divide over "
            f"the {batch_shards(mesh)} batch shards of the mesh"
        )
    if config.model.num_experts % mesh.shape["expert"]:
        raise ValueError(
            f"model.num_experts: {config.model.num_experts} do not divide over mesh.expert = {mesh.shape['expert']}"
        )
    with RunFolder(run_dir, config) as folder:
        try:
            run = _Run(config, run_dir, corpus, mesh, reporter, transfer)
        except BaseException:
            folder.discard()
            raise
        return run.finish()


def _new_run_dir(config: TrainConfig) -> Path:
    return Path("runs") / f"{config.preset}-{datetime.now():%Y%m%d-%H%M%S}"


class _Run:
    """The pieces of one run, made in order."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        corpus: Corpus,
        mesh: jax.sharding.Mesh,
        reporter: Reporter,
        transfer: Transfer | None,
    ):
        self.transfer = transfer
        self.config, self.run_dir, self.corpus, self.reporter = config, run_dir, corpus, reporter
        reporter.note(f"corpus: {corpus.description}")
        # A run that is continued has its own weights and tokenizer.
        self.initial: LoadedRun | None = None
        if config.init_from is not None and not has_checkpoint(run_dir):
            self.initial = load_model(config.init_from, mesh=mesh, like=config.model)
        self.tokenizer = self._tokenizer()
        train_tokens = self.tokenizer.encode_batch([d.text for d in corpus.train])
        self.held_out = self.tokenizer.encode_batch([d.text for d in corpus.held_out])
        self.lm_config = model_config(config, self.tokenizer)
        self.loader: BatchIterator = make_loader(
            train_tokens,
            eos_id=self.tokenizer.eos_id,
            start_id=self.tokenizer.start_id,
            seq_len=self.lm_config.context_length,
            batch_size=config.batch_size,
            seed=config.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        self.mesh, self.batch_sharding = mesh, batch_sharding(mesh)
        self.ladder = capacity_ladder()
        self.ladder_state = self.ladder.init()
        self.program: TrainProgram = self._program(self.lm_config)
        if transfer is not None:
            if not (run_dir / BASE_FILE).exists():
                vocab = {"vocab_size": self.lm_config.vocab_size} if config.base is None else {}
                shape = dataclasses.replace(transfer.base.shape, **vocab)
                write_text(run_dir / BASE_FILE, base_text(dataclasses.replace(transfer.base, shape=shape)))
            reporter.note(transfer.describe(self.program.abstract.params, config.optimizer))
        parameters = sum(x.size for x in jax.tree.leaves(self.program.abstract.params))
        tokens = sum(len(doc) for doc in train_tokens)
        reporter.note(
            f"model: {config.preset}, {parameters / 1e6:.2f} M parameters, {self.lm_config.vocab_size} tokens; "
            f"data: {tokens / 1e6:.2f} M tokens of {corpus.train_bytes / max(tokens, 1):.2f} bytes"
        )

    def _program(self, config: LMConfig) -> TrainProgram:
        return make_train_program(
            config,
            make_optimizer(self.config.optimizer, self.mesh, self.transfer),
            self.mesh,
            accumulation_steps=self.config.accumulation_steps,
            seed=self.config.seed,
            initialize=None if self.transfer is None else self.transfer.initialize,
        )

    def _tokenizer(self) -> Tokenizer:
        folder = self.run_dir / "tokenizer"
        if folder.is_dir():
            return load_tokenizer(folder)
        settings = self.config.tokenizer
        tokenizer: Tokenizer
        if self.initial is not None:
            tokenizer = self.initial.tokenizer
        elif settings.kind == "bytes":
            tokenizer = ByteTokenizer()
        else:
            texts = [d.text for d in self.corpus.train]
            tokenizer = BPETokenizer.train(texts, settings.vocab_size, seed=self.config.seed)
        partial = self.run_dir / ".tokenizer"
        tokenizer.save(partial)
        partial.rename(folder)
        return tokenizer

    def finish(self) -> RunResult:
        """Train to the end and write everything that a finished run has."""
        with Checkpointer(self.run_dir / "checkpoints", keep=self.config.keep_checkpoints) as checkpointer:
            state, elapsed = self._start(checkpointer)
            first_step = int(state.step)
            with MetricsWriter(self.run_dir, resume_step=first_step) as metrics:
                with self.reporter:
                    state, elapsed = self._steps(state, elapsed, checkpointer, metrics)
                model = nnx.merge_state(state.params, state.rest)
                self.reporter.note("evaluating on all held-out text ...")
                bits = self._held_out_bits(model, self.held_out, self.corpus.held_out_bytes)
                metrics.write(int(state.step), {"held_out_bits_per_byte": bits})
            if checkpointer.latest_step != int(state.step):
                self._save(checkpointer, state, elapsed)
        ngrams = self._ngrams()
        baselines = {f"{order}-gram": value for order, value in ngrams.items()}
        plot_loss(self.run_dir, baselines=baselines)
        samples = self._samples(model)
        result = RunResult(self.run_dir, int(state.step), bits, ngrams, samples, int(state.skipped))
        write_text(self.run_dir / "samples.txt", "\n\n".join(f"{'=' * 80}\n{sample}" for sample in samples) + "\n")
        write_text(
            self.run_dir / "result.json",
            json.dumps(
                {
                    "steps": result.steps,
                    "skipped_steps": result.skipped_steps,
                    "training_seconds": elapsed,
                    "held_out_bits_per_byte": bits,
                    "ngram_bits_per_byte": ngrams,
                    "corpus": {
                        "description": self.corpus.description,
                        "fingerprint": self.corpus.fingerprint,
                    },
                    "config": dataclasses.asdict(self.config),
                },
                indent=2,
            )
            + "\n",
        )
        return result

    def _start(self, checkpointer: Checkpointer) -> tuple[TrainState, float]:
        step = checkpointer.latest_step
        if step is None:
            state = self.program.init(jax.random.key(self.config.seed))
            if self.initial is None:
                return state, 0.0
            self.reporter.note(f"starting from {self.config.init_from}")
            # What the model has beyond that of the start, L2A's routers, stays as it was made.
            parts = nnx.split_state(self.initial.state, nnx.Param, ...)
            params, rest = (
                jax.device_put(from_named_arrays(new, named_arrays(new) | named_arrays(part)), where)
                for new, part, where in zip(
                    (state.params, state.rest),
                    parts,
                    (self.program.shardings.params, self.program.shardings.rest),
                    strict=True,
                )
            )
            self.initial = None
            return state._replace(params=params, rest=rest), 0.0
        state, meta = restore_state(checkpointer, step, self.program)
        if "data" in meta:
            self.loader.set_state(meta["data"])
        self.ladder_state = CapacityLadderState(*meta.get("capacity_ladder", self.ladder_state))
        self.reporter.note(f"continuing from step {step}")
        return state, float(meta.get("elapsed", 0.0))

    def _save(self, checkpointer: Checkpointer, state: TrainState, elapsed: float) -> None:
        meta = {"data": self.loader.get_state(), "elapsed": elapsed, "capacity_ladder": list(self.ladder_state)}
        save_state(checkpointer, state, meta)

    def _steps(
        self, state: TrainState, elapsed: float, checkpointer: Checkpointer, metrics: MetricsWriter
    ) -> tuple[TrainState, float]:
        config = self.config
        started = time.perf_counter() - elapsed
        monitor, monitor_bytes = self._monitor_documents()
        record = _StepRecorder(config, metrics, self.reporter)
        step = int(state.step)
        program = self._with_capacity(CAPACITY_RATES[self.ladder_state.rung])
        with _StopSignals() as stop:
            while True:
                elapsed = time.perf_counter() - started
                fraction = step / config.steps if config.steps else elapsed / (config.time_limit or 1.0)
                if fraction >= 1 or stop.requested:
                    break
                batch = self._place(next(self.loader))
                schedule = [learning_rate_at(config.optimizer, step, fraction)]
                if state.routing_control is not None:
                    schedule.append(float(_temperature(fraction)))
                state, step_metrics = program.step(state, batch, *schedule)
                step += 1
                record.add(step, fraction, elapsed, step_metrics, _olion_figures(config, step, state))
                if "l2a_busiest_rate" in record.last:
                    before = self.ladder_state.rung
                    rate, self.ladder_state = self.ladder.update([record.last["l2a_busiest_rate"]], self.ladder_state)
                    program = program if self.ladder_state.rung == before else self._with_capacity(rate)
                if config.evaluate_every and step % config.evaluate_every == 0 and monitor:
                    bits = self._held_out_bits(nnx.merge_state(state.params, state.rest), monitor, monitor_bytes)
                    metrics.write(step, {"monitor_bits_per_byte": bits})
                if config.checkpoint_every and step % config.checkpoint_every == 0:
                    self._save(checkpointer, state, time.perf_counter() - started)
        record.flush()
        if stop.requested:
            if checkpointer.latest_step != step:
                self._save(checkpointer, state, elapsed)
            raise Interrupted(
                f"stopped at step {step} and saved; the same command with --run-dir {self.run_dir} continues"
            )
        return state, elapsed

    def _with_capacity(self, rate: float) -> TrainProgram:
        """The program whose L2A layers have room for this rate, not more than the configuration's."""
        l2a = self.lm_config.l2a
        if self.lm_config.attention != "l2a" or rate >= l2a.capacity_rate:
            return self.program
        self.reporter.note(f"every layer's routing rate is calm: capacity for {rate:g} of the tokens")
        return self._program(dataclasses.replace(self.lm_config, l2a=dataclasses.replace(l2a, capacity_rate=rate)))

    def _place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        # Positions restart per document, which rotary attention inside documents cannot tell from not restarting.
        batch.pop("positions")
        return {
            name: jax.make_array_from_process_local_data(self.batch_sharding, value) for name, value in batch.items()
        }

    def _monitor_documents(self) -> tuple[list[np.ndarray], int]:
        chosen: list[np.ndarray] = []
        size = 0
        for document, tokens in zip(self.corpus.held_out, self.held_out, strict=True):
            if size >= _MONITOR_BYTES:
                break
            if document.num_bytes <= _MONITOR_BYTES // 2 or not chosen:
                chosen.append(tokens)
                size += document.num_bytes
        return chosen, size

    def _held_out_bits(self, model: nnx.State, documents: list[np.ndarray], num_bytes: int) -> float:
        if not documents:
            return float("nan")
        nats, _ = total_nats(
            self.program.graphdef,
            model,
            documents,
            eos_id=self.tokenizer.eos_id,
            start_id=self.tokenizer.start_id,
            batch_size=self.config.batch_size,
        )
        return bits_per_byte(nats, num_bytes)

    def _ngrams(self) -> dict[int, float]:
        if not self.held_out or self.corpus.train_bytes > _NGRAM_MAX_BYTES:
            self.reporter.note("no n-gram baseline: no held-out text, or too much training text")
            return {}
        self.reporter.note("fitting byte n-gram models on the same files ...")
        train_bytes = [document.utf8 for document in self.corpus.train]
        held_out = [document.utf8 for document in self.corpus.held_out]
        return {n: WittenBellNGram.fit(train_bytes, order=n).bits_per_byte(held_out) for n in _NGRAM_ORDERS}

    def _samples(self, model: nnx.State) -> list[str]:
        context, length = self.lm_config.context_length, self.config.sample_tokens
        if not length or context < 2:
            return []
        beginnings = ["", *(d.text[:_SAMPLE_PROMPT_BYTES] for d in self.corpus.held_out[:2])]
        start = np.array([self.tokenizer.start_id], np.int32)
        length = min(length, context - 1)
        prompts = [np.concatenate([start, self.tokenizer.encode(text)])[: context - length] for text in beginnings]
        tokens, lengths = pad_prompts(prompts)
        out = generate(
            self.program.graphdef,
            model,
            tokens,
            lengths,
            jax.random.key(self.config.seed),
            max_new_tokens=length,
            sampling=Sampling(),
            stop_tokens=(self.tokenizer.eos_id,),
        )
        rows = zip(prompts, np.asarray(out.tokens), np.asarray(out.lengths), strict=True)
        return [self.tokenizer.decode(np.concatenate([prompt, row[:n]])) for prompt, row, n in rows]


_temperature = routing_temperature(1)  # of L2A's exploration, at a fraction of the run


def _olion_figures(config: TrainConfig, step: int, state: TrainState) -> dict[str, Any]:
    """Names and values to log after `step` about OLion's momentum; none where they are not due."""
    due = config.diagnose_every and step % config.diagnose_every == 0
    if not due or not find_states(state.opt_state, ScaleByOlionState):
        return {}
    call = step // config.diagnose_every - 1
    summary = olion_run_metrics(state.opt_state, state.params, call=call).summary
    return {f"olion_{name}": value for name, value in summary.items()}


class _StepRecorder:
    """Writes and shows each step's figures once they are there, one step late."""

    def __init__(self, config: TrainConfig, metrics: MetricsWriter, reporter: Reporter):
        self._config, self._metrics, self._reporter = config, metrics, reporter
        self._spikes = SpikeDetector()
        self._pending: tuple[int, float, float, StepMetrics, dict[str, Any]] | None = None
        self._last_time: float | None = None
        self._speed: float | None = None
        self.last: dict[str, float] = {}
        """Figures of the step before the one that is waiting."""

    def add(self, step: int, fraction: float, elapsed: float, metrics: StepMetrics, more: dict[str, Any]) -> None:
        """Take a step that has just been started, and further figures for its record."""
        self.flush()
        self._pending = (step, fraction, elapsed, metrics, more)

    def flush(self) -> None:
        """Write the step that is waiting."""
        if self._pending is None:
            return
        step, fraction, elapsed, metrics, more = self._pending
        self._pending = None
        figures = metrics._asdict()
        for group in ("stabilizer", "l2a"):
            figures |= {f"{group}_{name}": value for name, value in figures.pop(group).items()}
        self.last = values = {name: float(value) for name, value in {**figures, **more}.items()}
        now = time.perf_counter()
        if self._last_time is not None:
            speed = values["tokens"] / (now - self._last_time)
            self._speed = speed if self._speed is None else 0.9 * self._speed + 0.1 * speed
        self._last_time = now
        spike = self._spikes.update(values["grad_norm"])
        speed = self._speed or 0.0
        self._metrics.write(step, {**values, "tokens_per_second": speed, "spike": float(spike)})
        left = elapsed * (1 - fraction) / fraction if self._config.steps and fraction else 0.0
        if self._config.time_limit is not None:
            left = self._config.time_limit - elapsed
        self._reporter.step(Progress(step, fraction, values["loss"], values["grad_norm"], speed, max(left, 0.0), spike))
