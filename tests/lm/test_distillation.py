"""Fine-tuning towards the dense model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlib_icml.lm import LMConfig, Transformer, abstract_transformer, split_model
from jaxlib_icml.lm.conversion import convert_to_moe
from jaxlib_icml.lm.distillation import DistillationWeights, distillation_loss, move_biases, trainable
from jaxlib_icml.moe.prism_moe import PrismConfig

pytestmark = pytest.mark.slow

CONFIG = LMConfig(vocab_size=32, context_length=16, width=16, num_layers=2, num_heads=2, mlp_width=64)


@pytest.fixture(scope="module")
def models():
    teacher = Transformer(CONFIG, rngs=nnx.Rngs(0))
    # Larger than they start, so that there is something to lose.
    for block in teacher.layers:
        block.mlp.down.kernel[...] *= 3
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, 32)
    prism = PrismConfig(num_experts=6, num_active=1, min_tokens=16)
    done = convert_to_moe(nnx.state(teacher), CONFIG, tokens, prism, compensate=False, router_delta=4)
    return teacher, done, {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}


def student_of(done, **change):
    config = dataclasses.replace(done.config, **change)
    return nnx.merge(nnx.split(abstract_transformer(config))[0], done.state)


def test_nothing_to_learn_with_all_experts(models):
    teacher, done, batch = models
    loss, aux = distillation_loss(student_of(done, num_active_experts=6), teacher, batch)
    for term in (aux.output, aux.hidden, aux.blocks.combination):
        assert float(term) == pytest.approx(0, abs=1e-6)
    assert float(aux.cross_entropy) > 0
    few = distillation_loss(student_of(done), teacher, batch)[1]
    assert float(few.output) > 1e-4
    assert float(few.hidden) > 1e-3
    assert float(few.blocks.combination) > 1e-4
    np.testing.assert_allclose(few.load.sum(1), 1)
    assert float(loss) > float(aux.cross_entropy)


def test_training_routers_and_experts_brings_the_student_closer(models):
    teacher, done, batch = models
    graphdef, params, rest = split_model(student_of(done))
    mask = trainable(params)
    tx = optax.partition({True: optax.adam(3e-3), False: optax.set_to_zero()}, mask)
    state = tx.init(params)

    @jax.jit
    def step(params, state, rest):
        def loss(params):
            return distillation_loss(nnx.merge(graphdef, params, rest), teacher, batch)

        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        model = nnx.merge(graphdef, params, rest)
        move_biases(model, aux.load)
        return params, state, split_model(model)[2], aux

    start, history = params, []
    for _ in range(40):
        params, state, rest, aux = step(params, state, rest)
        history.append(aux)
    assert float(history[-1].blocks.combination) < 0.8 * float(history[0].blocks.combination)
    assert float(history[-1].output) < 0.8 * float(history[0].output)
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), start, params)
    assert jax.tree.leaves(changed) == jax.tree.leaves(mask)


def test_misuse(models):
    teacher, done, batch = models
    student = student_of(done)
    with pytest.raises(ValueError, match="the student needs experts"):
        distillation_loss(teacher, teacher, batch)
    with pytest.raises(ValueError, match="must be dense"):
        distillation_loss(student, student, batch)
    with pytest.raises(ValueError, match="hidden"):
        DistillationWeights(hidden=-1.0)
    with pytest.raises(ValueError, match="mixing"):
        DistillationWeights(mixing=2.0)
    deeper = Transformer(dataclasses.replace(CONFIG, num_layers=3), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="equally many layers"):
        distillation_loss(student, deeper, batch)
