"""The training state and the compiled training step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxlib_icml.attention import L2AAux, RateControllerState, rate_controller
from jaxlib_icml.lm import Exploration, LMConfig, LossAux, Transformer, abstract_transformer, loss_fn, split_model
from jaxlib_icml.moe import RoutingStats
from jaxlib_icml.nn import state_shardings
from jaxlib_icml.optim import StabilizerState, find_states, stabilizer_run_metrics
from jaxlib_icml.training.checkpoints import Checkpointer, abstract_arrays
from jaxlib_icml.training.mesh import batch_sharding, optimizer_shardings, replicated

Batch = dict[str, Array]
# A transformation for a (possibly traced) learning rate; its state must not depend on the rate.
OptimizerFactory = Callable[[Any], optax.GradientTransformation]


class TrainState(NamedTuple):
    """Everything a run carries from step to step."""

    step: Int[Array, ""]
    """Steps done (int32), skipped ones included."""
    params: nnx.State
    """Trainable parameters."""
    rest: nnx.State
    """Variables without gradients: the experts' selection biases."""
    opt_state: Any
    """State of the optimizer."""
    skipped: Int[Array, ""]
    """Steps whose gradients were not finite (int32); they changed nothing but the counters."""
    routing_control: RateControllerState | None = None
    """The price of global attention; None without L2A."""


class StepMetrics(NamedTuple):
    """Figures of one step, float32 scalars."""

    loss: Float[Array, ""]
    """Mean negative log-likelihood in nats per target, without auxiliary terms."""
    grad_norm: Float[Array, ""]
    """Global norm of the raw gradients."""
    learning_rate: Float[Array, ""]
    tokens: Float[Array, ""]
    """Targets with weight."""
    max_violation: Float[Array, ""]
    """Worst (load / mean load - 1) over layers and experts; 0 for dense models."""
    finite: Float[Array, ""]
    """1, or 0 when the step was skipped."""
    stabilizer: dict[str, Float[Array, ""]]
    """Ratio of stabilised to raw norms, spikes and skipped units (`stabilizer_run_metrics`); empty without a
    GradientStabilizer."""
    l2a: dict[str, Float[Array, ""]]
    """Routing rate (mean and largest over layers), its price, the noise's temperature and the share of routed tokens
    that were dropped; empty without L2A."""


class TrainProgram(NamedTuple):
    """A model bound to an optimizer and a mesh.

    `init(key)` makes the state, sharded; `step(state, batch, learning_rate)` consumes it (buffers are donated) and
    returns `(state, StepMetrics)`; with L2A a fourth argument is the temperature of its exploration. `abstract` and
    `shardings` describe the state without allocating it.
    """

    graphdef: nnx.GraphDef
    init: Any
    step: Any
    abstract: TrainState
    shardings: TrainState


def save_state(checkpointer: Checkpointer, state: TrainState, meta: Mapping[str, Any]) -> None:
    """Start saving everything that a run carries from step to step.

    Args:
      checkpointer: the run's checkpoints.
      state: what to save, under its own step.
      meta: JSON-able values beside it (data position, elapsed time).
    """
    checkpointer.save(int(state.step), (state.params, state.rest), _beside_the_model(state), meta)


def restore_state(checkpointer: Checkpointer, step: int, program: TrainProgram) -> tuple[TrainState, dict[str, Any]]:
    """Read what `save_state` wrote.

    Args:
      checkpointer: the run's checkpoints.
      step: which one.
      program: the model and optimizer of the run.

    Returns:
      The state, sharded as the program says, and the values beside it.

    Raises:
      ValueError: a checkpoint of another model or optimizer, or of a model that nothing was trained of here.
    """
    abstract, shardings = program.abstract, program.shardings
    model = abstract_arrays((abstract.params, abstract.rest), (shardings.params, shardings.rest))
    optimizer = abstract_arrays(_beside_the_model(abstract), _beside_the_model(shardings))
    (params, rest), (count, opt_state, skipped, *control), meta = checkpointer.restore(step, model, optimizer)
    return TrainState(count, params, rest, opt_state, skipped, *control), meta


def _beside_the_model(state: TrainState) -> tuple[Any, ...]:
    """What a checkpoint keeps apart from the model; L2A's price only where there is one."""
    control = () if state.routing_control is None else (state.routing_control,)
    return (state.step, state.opt_state, state.skipped, *control)


def make_train_program(
    config: LMConfig,
    optimizer: OptimizerFactory,
    mesh: Mesh,
    *,
    accumulation_steps: int = 1,
    seed: int = 0,
    initialize: Callable[[nnx.State, Array], nnx.State] | None = None,
) -> TrainProgram:
    """Build the state initialiser and the jitted step of a language model.

    Args:
      config: the model.
      optimizer: learning rate -> Optax transformation, e.g. `lambda lr: optax.chain(gradient_stabilizer(), olion(lr))`.
      mesh: where it runs (`make_mesh`).
      accumulation_steps: micro-batches per step; the batch axis must be a multiple. Losses and gradients equal those of
        the whole batch (balancing terms are averaged over micro-batches).
      seed: of L2A's exploration.
      initialize: from the usual initial parameters and a key to others of the same shapes; None: the usual ones.

    Returns:
      `TrainProgram`.

    Raises:
      ValueError: `accumulation_steps` below 1, or a batch it does not divide.
    """
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps: must be at least 1, got {accumulation_steps}")
    graphdef, _, _ = split_model(abstract_transformer(config))
    has_l2a = config.attention == "l2a"
    l2a = config.l2a
    controller = rate_controller(l2a.target_rate, l2a.price_step, damping=l2a.price_damping)

    def init(key: Array) -> TrainState:
        _, params, rest = split_model(Transformer(config, rngs=nnx.Rngs(params=key)))
        if initialize is not None:
            params = initialize(params, key)
        zero = jnp.zeros((), jnp.int32)
        control = controller.init() if has_l2a else None
        return TrainState(zero, params, rest, optimizer(0.0).init(params), zero, control)

    abstract = jax.eval_shape(init, jax.random.key(0))
    everywhere = replicated(mesh)
    shardings: Any = jax.tree.map(lambda _: everywhere, abstract)._replace(
        params=state_shardings(abstract.params, mesh),
        rest=state_shardings(abstract.rest, mesh),
        opt_state=optimizer_shardings(abstract.opt_state, abstract.params, mesh),
    )

    def step(
        state: TrainState, batch: Batch, learning_rate: Array, temperature: Array
    ) -> tuple[TrainState, StepMetrics]:
        exploration, price = None, jnp.zeros((), jnp.float32)
        if state.routing_control is not None:
            exploration = Exploration(jax.random.fold_in(jax.random.key(seed), state.step), temperature)
            price = state.routing_control.price
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # experts find their devices by it
            grads, aux = _gradients(graphdef, state.params, state.rest, batch, accumulation_steps, exploration, price)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm)

        def apply(state: TrainState) -> TrainState:
            tx = optimizer(learning_rate)
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            rest = state.rest if aux.routing is None else _balance(graphdef, params, state.rest, aux.routing)
            control = state.routing_control
            if control is not None and aux.l2a is not None:
                control = controller.update(aux.l2a.rate, control)[1]
            return state._replace(params=params, rest=rest, opt_state=opt_state, routing_control=control)

        before = state.opt_state
        state = jax.lax.cond(finite, apply, lambda state: state, state)
        stabilized = len(find_states(before, StabilizerState)) == 1
        state = state._replace(step=state.step + 1, skipped=state.skipped + ~finite)
        violation = 0.0 if aux.routing is None else jnp.max(aux.routing.max_violation)
        metrics = StepMetrics(
            loss=aux.nll_sum / jnp.maximum(aux.weight_sum, 1.0),
            grad_norm=grad_norm,
            learning_rate=jnp.asarray(learning_rate, jnp.float32),
            tokens=aux.weight_sum,
            max_violation=jnp.asarray(violation, jnp.float32),
            finite=finite.astype(jnp.float32),
            stabilizer=stabilizer_run_metrics(before, state.opt_state).summary if stabilized else {},
            l2a={} if aux.l2a is None else _routing_figures(aux.l2a, price, temperature),
        )
        return state, metrics

    jitted_init = jax.jit(init, out_shardings=shardings)

    def plain_step(state: TrainState, batch: Batch, learning_rate: Array) -> tuple[TrainState, StepMetrics]:
        return step(state, batch, learning_rate, jnp.zeros((), jnp.float32))

    jitted_step = jax.jit(
        step if has_l2a else plain_step,
        in_shardings=(shardings, batch_sharding(mesh), everywhere, *([everywhere] if has_l2a else [])),
        out_shardings=(shardings, everywhere),
        donate_argnums=(0,),
    )
    return TrainProgram(graphdef, jitted_init, jitted_step, abstract, shardings)


def _gradients(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    rest: nnx.State,
    batch: Batch,
    accumulation_steps: int,
    exploration: Exploration | None,
    price: Array,
) -> tuple[nnx.State, LossAux]:
    def loss(params: nnx.State, batch: Batch, explore: Exploration | None) -> tuple[Array, LossAux]:
        model = nnx.merge_state(params, rest)
        return loss_fn(graphdef, model, batch, weight_sum, exploration=explore, routing_price=price)

    rows, seq = batch["tokens"].shape
    weights = batch.get("weights", jnp.ones((rows, seq), jnp.float32))
    weight_sum = jnp.sum(weights)
    gradient = jax.grad(loss, has_aux=True)
    if accumulation_steps == 1:
        return gradient(params, batch, exploration)
    if rows % accumulation_steps:
        raise ValueError(f"accumulation_steps: {accumulation_steps} does not divide the batch of {rows} rows")

    # Interleaved rows, so that a sharded batch axis stays sharded inside every micro-batch.
    micro = {k: v.reshape(-1, accumulation_steps, seq).swapaxes(0, 1) for k, v in batch.items()}

    def add(total: nnx.State, part: tuple[Batch, Array]) -> tuple[nnx.State, LossAux]:
        explore = None
        if exploration is not None:
            explore = exploration._replace(key=jax.random.fold_in(exploration.key, part[1]))
        grads, aux = gradient(params, part[0], explore)
        return jax.tree.map(jnp.add, total, grads), aux

    parts = (micro, jnp.arange(accumulation_steps))
    grads, aux = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    routing, l2a = (jax.tree.map(lambda x: jnp.mean(x, axis=0), stats) for stats in (aux.routing, aux.l2a))
    return grads, LossAux(jnp.sum(aux.nll_sum), jnp.sum(aux.weight_sum), routing, l2a)


def _routing_figures(aux: L2AAux, price: Array, temperature: Array) -> dict[str, Array]:
    asked = jnp.sum(aux.n_routed + aux.n_overflow)
    return {
        "rate": jnp.mean(aux.rate),
        "busiest_rate": jnp.max(aux.rate),
        "price": price,
        "temperature": jnp.asarray(temperature, jnp.float32),
        "dropped": jnp.sum(aux.n_overflow) / jnp.maximum(asked, 1),
    }


def _balance(graphdef: nnx.GraphDef, params: nnx.State, rest: nnx.State, routing: RoutingStats) -> nnx.State:
    model = nnx.merge(graphdef, params, rest)
    model.update_expert_biases(routing.load)
    return split_model(model)[2]
