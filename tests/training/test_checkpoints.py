import chex
import jax
import jax.numpy as jnp
import pytest

from jaxlib_icml.training.checkpoints import Checkpointer, from_named_arrays, named_arrays

STATE = {
    "kernel": jnp.arange(6.0).reshape(2, 3),
    "half": jnp.array([1.5, jnp.inf], jnp.bfloat16),
    "nested": (jnp.zeros((), jnp.int32), [jnp.ones((4,))]),
}
OPTIMIZER = {"count": jnp.array(7, jnp.int32)}


def abstract(tree):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


@pytest.fixture
def saved(tmp_path):
    with Checkpointer(tmp_path / "checkpoints", keep=2) as checkpointer:
        for step in (1, 2, 3):
            scaled = jax.tree.map(lambda x, step=step: x * step, STATE)
            checkpointer.save(step, scaled, OPTIMIZER, {"data": {"next": step}, "elapsed": 0.5})
    return tmp_path / "checkpoints"


def test_everything_comes_back_and_only_the_newest_are_kept(saved):
    with Checkpointer(saved, keep=2) as checkpointer:
        assert checkpointer.latest_step == 3
        model, optimizer, meta = checkpointer.restore(3, abstract(STATE), abstract(OPTIMIZER))
        chex.assert_trees_all_equal(model, jax.tree.map(lambda x: x * 3, STATE))
        chex.assert_trees_all_equal_dtypes(model, STATE)
        chex.assert_trees_all_equal(optimizer, OPTIMIZER)
        assert meta == {"data": {"next": 3}, "elapsed": 0.5}
        chex.assert_trees_all_equal(
            checkpointer.restore_model(2, abstract(STATE)), jax.tree.map(lambda x: x * 2, STATE)
        )
    assert sorted(p.name for p in saved.iterdir() if p.is_dir()) == ["2", "3"]


def test_a_save_is_a_copy_of_the_moment(tmp_path):
    """The buffers may be donated to the next step while the save is still being written."""
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    x = jnp.arange(1e6)
    with Checkpointer(tmp_path / "c", keep=9) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"x": x}, OPTIMIZER, {})
            for _ in range(3):
                x = double(x)
    with Checkpointer(tmp_path / "c", keep=9) as checkpointer:
        for step in range(4):
            restored = checkpointer.restore_model(step, abstract({"x": x}))["x"]
            chex.assert_trees_all_equal(restored, jnp.arange(1e6) * 8.0**step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {**s, "extra": jnp.zeros(1)}, "lacks extra"),
        (lambda s: {k: v for k, v in s.items() if k != "kernel"}, "unknown kernel"),
        (lambda s: {**s, "kernel": jnp.zeros((3, 2))}, "kernel is float32"),
        (lambda s: {**s, "half": s["half"].astype(jnp.float32)}, "half is bfloat16"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_before_it_is_read(saved, change, message):
    with Checkpointer(saved) as checkpointer, pytest.raises(ValueError, match=message):
        checkpointer.restore(3, abstract(change(STATE)), abstract(OPTIMIZER))


def test_names_are_paths_and_must_be_unique():
    named = named_arrays(STATE)
    assert list(named) == ["half", "kernel", "nested.0", "nested.1.0"]
    chex.assert_trees_all_equal(from_named_arrays(STATE, named), STATE)
    with pytest.raises(ValueError, match="share a name"):
        named_arrays({"a": {"b": 1}, "a.b": 2})
    with pytest.raises(ValueError, match="keep"):
        Checkpointer("unused", keep=0)
