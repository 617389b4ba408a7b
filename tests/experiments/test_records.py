"""Result files: what JSON gets, and that files change together or not at all."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.records import file_stem, plain, read_json, write_json, write_together

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_plain_is_strict_json_and_settles_after_one_pass(value):
    once = plain(value)
    assert json.loads(json.dumps(once, allow_nan=False)) == once
    assert plain(once) == once


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_seven_digits(value):
    assert plain(value) == pytest.approx(value, rel=5e-7, abs=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_])
def test_arrays_become_lists(dtype):
    array = jnp.asarray([[0, 1], [2, 3]]).astype(dtype)
    assert plain({"a": array, "scalar": array[0, 1]}) == {
        "a": np.asarray(array, np.float64).tolist(),
        "scalar": 1,
    }


def test_what_is_not_finite_is_said_in_words():
    assert plain([math.nan, math.inf, -math.inf, np.float32("nan")]) == ["nan", "inf", "-inf", "nan"]


def test_what_json_cannot_hold_is_named():
    with pytest.raises(TypeError, match="JSON cannot hold a object"):
        plain({"x": object()})


def test_files_change_together_or_not_at_all(tmp_path):
    first, second = tmp_path / "a" / "first.txt", tmp_path / "b" / "second.txt"
    write_together({path: lambda p: p.write_text("old", encoding="utf-8") for path in (first, second)})

    def fail(path):
        path.write_text("half", encoding="utf-8")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_together({first: lambda p: p.write_text("new", encoding="utf-8"), second: fail})
    assert first.read_text(encoding="utf-8") == second.read_text(encoding="utf-8") == "old"
    write_together({path: lambda p: p.write_text("new", encoding="utf-8") for path in (first, second)})
    assert first.read_text(encoding="utf-8") == second.read_text(encoding="utf-8") == "new"
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["first.txt", "second.txt"]


def test_records_come_back_and_damage_is_named(tmp_path):
    record = {"name": "x/y", "values": [1.0, "nan"], "title": "größer ≤ 2"}
    write_json(tmp_path / "r.json", record)
    assert read_json(tmp_path / "r.json") == record
    (tmp_path / "cut.json").write_text('{"name": ', encoding="utf-8")
    (tmp_path / "other.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"cut\.json is not JSON"):
        read_json(tmp_path / "cut.json")
    with pytest.raises(ValueError, match=r"other\.json is not a result file"):
        read_json(tmp_path / "other.json")


def test_scales_do_not_share_files(tmp_path):
    stems = {file_stem(tmp_path, "x/y", scale) for scale in ("laptop", "full")}
    assert stems == {tmp_path / "x/y", tmp_path / "x/y.full"}
