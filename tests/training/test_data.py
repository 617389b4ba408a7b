"""Packing, order, sharding and resumption, against a packing written with Python lists."""

import itertools
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.training.data import PackedDataset, bits_per_byte, evaluation_batches, make_loader

EOS = 9999
KEYS = ("tokens", "targets", "segment_ids", "positions", "weights")


def documents_of(lengths):
    """Documents in which every token of the corpus is a different number."""
    numbers = itertools.count()
    return [np.array(list(itertools.islice(numbers, length)), np.int64) for length in lengths]


def rows_by_lists(documents, seq_len, start=0, length=None):
    """One row of (token, target, segment, position) per place, packed with Python lists."""
    stream = []
    for number, tokens in enumerate(document for document in documents if len(document)):
        ids = [EOS, *tokens.tolist(), EOS]
        stream += [(ids[i], ids[i + 1], number, i) for i in range(len(ids) - 1)]
    row = stream[start : start + seq_len]
    first_number, first_place = row[0][2], row[0][3]
    return [
        (token, target, number - first_number + 1, place - (first_place if number == first_number else 0))
        for token, target, number, place in row
    ]


def places(batch):
    """(token, target, segment, position) of every place of every row that is not padding."""
    columns = [batch[name] for name in KEYS[:4]]
    return [
        [entry for entry in zip(*(column[row].tolist() for column in columns), strict=True) if entry[2] > 0]
        for row in range(columns[0].shape[0])
    ]


def stack(batches):
    batches = list(batches)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in KEYS}


def assert_batches_equal(left, right):
    for name in KEYS:
        np.testing.assert_array_equal(left[name], right[name])
        assert left[name].dtype == right[name].dtype


def expected_targets(documents):
    kept = [document for document in documents if len(document)]
    return sorted([token for document in kept for token in document.tolist()] + [EOS] * len(kept))


corpora = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any).map(documents_of)
lengths = st.integers(1, 9)


class TestPacking:
    @settings(max_examples=100, deadline=None)
    @given(corpora, lengths, st.integers(1, 4))
    def test_unshuffled_rows_are_those_of_the_lists(self, documents, seq_len, batch_size):
        total = len(expected_targets(documents))
        seq_len = min(seq_len, total)
        batch = stack(
            make_loader(
                documents,
                eos_id=EOS,
                seq_len=seq_len,
                batch_size=batch_size,
                seed=0,
                shuffle=False,
                num_epochs=1,
            )
        )
        starts = range(0, total, seq_len)
        rows = places(batch)
        assert rows[: len(starts)] == [rows_by_lists(documents, seq_len, start) for start in starts]
        assert all(row == [] for row in rows[len(starts) :])
        assert len(rows) == batch_size * math.ceil(len(starts) / batch_size)

    def test_padding_and_dtypes(self):
        loader = make_loader(documents_of([3, 4]), eos_id=EOS, seq_len=5, batch_size=3, seed=0, num_epochs=1)
        (batch,) = loader
        padding = batch["segment_ids"] == 0
        assert padding.sum() == 15 - 9
        np.testing.assert_array_equal(batch["weights"], (~padding).astype(np.float32))
        assert (batch["tokens"][padding] == EOS).all()
        assert (batch["targets"][padding] == EOS).all()
        assert (batch["positions"][padding] == 0).all()
        assert {name: str(array.dtype) for name, array in batch.items()} == {
            **dict.fromkeys(KEYS[:4], "int32"),
            "weights": "float32",
        }
        assert all(array.shape == (3, 5) for array in batch.values())

    @settings(max_examples=60, deadline=None)
    @given(corpora, lengths, st.integers(1, 4), st.integers(0, 2**40))
    def test_a_shuffled_epoch_has_every_target_once_after_its_own_document(self, documents, seq_len, batch_size, seed):
        seq_len = min(seq_len, len(expected_targets(documents)))
        batch = stack(
            make_loader(documents, eos_id=EOS, seq_len=seq_len, batch_size=batch_size, seed=seed, num_epochs=1)
        )
        follows = {}  # what comes before a token; before an eos comes the last token of some document
        for document in documents:
            for before, token in itertools.pairwise([EOS, *document.tolist()]):
                follows[token] = before
        last = {document[-1] for document in documents if len(document)}
        counted = []
        for row in places(batch):
            for token, target, _, _ in row:
                counted.append(target)
                assert token in last if target == EOS else token == follows[target]
            for _, group in itertools.groupby(row, key=lambda place: place[2]):
                group = list(group)
                assert [position for *_, position in group] == list(range(len(group)))
                assert [token for token, *_ in group[1:]] == [target for _, target, *_ in group[:-1]]
        assert sorted(counted) == expected_targets(documents)

    def test_row_gather_with_a_document_order(self):
        documents = documents_of([2, 3, 1])
        data = PackedDataset(documents, eos_id=EOS, seq_len=9)
        order = np.array([2, 0, 1])
        expected = rows_by_lists([documents[i] for i in order], 9)
        assert places(data.rows(np.array([0]), order)) == [expected]
        assert data.num_targets == 9
        assert data.num_documents == 3


class TestOrder:
    def loader(self, **options):
        settings_ = {"eos_id": EOS, "seq_len": 8, "batch_size": 4, "seed": 3, **options}
        return make_loader(documents_of([13, 50, 7, 90, 41]), **settings_)

    def epochs(self, count, **options):
        """The rows of each epoch: 201 + 5 targets make 26 rows of 8."""
        rows = places(stack(self.loader(num_epochs=count, **options)))
        return [rows[i * 26 : (i + 1) * 26] for i in range(count)]

    def test_epochs_differ_and_each_is_complete(self):
        first, second = self.epochs(2)
        for rows in (first, second):
            targets = sorted(target for row in rows for _, target, *_ in row)
            assert targets == expected_targets(documents_of([13, 50, 7, 90, 41]))
        assert first != second
        # Documents are concatenated in another order, so rows are cut at other places too.
        assert {tuple(row) for row in first} != {tuple(row) for row in second}

    def test_without_shuffling_epochs_repeat(self):
        first, second = self.epochs(2, shuffle=False)
        assert first == second

    def test_seed_decides(self):
        assert self.epochs(1) == self.epochs(1)
        assert self.epochs(1) != self.epochs(1, seed=4)

    def test_prefetching_changes_nothing(self):
        plain, ahead = self.loader(prefetch=0), self.loader(prefetch=5)
        for _ in range(20):
            assert_batches_equal(next(plain), next(ahead))

    def test_endless_is_a_continuation_of_finite(self):
        endless = self.loader()
        for batch in itertools.islice(self.loader(num_epochs=2), 13):
            assert_batches_equal(batch, next(endless))

    def test_length(self):
        assert self.loader().batches_per_epoch == 26 / 4
        assert len(list(self.loader(num_epochs=2))) == 13
        assert len(list(self.loader(num_epochs=1))) == 7

    @pytest.mark.parametrize("count", [2, 4])
    def test_processes_share_each_batch(self, count):
        shards = [self.loader(num_epochs=3, process_index=i, process_count=count) for i in range(count)]
        for batch, *parts in zip(self.loader(num_epochs=3), *shards, strict=True):
            assert all(part["tokens"].shape == (4 // count, 8) for part in parts)
            assert_batches_equal(batch, stack(parts))

    @pytest.mark.parametrize("steps", [0, 1, 5, 6, 7, 40])
    def test_resumes_bit_for_bit(self, steps):
        loader = self.loader()
        for _ in range(steps):
            next(loader)
        state = json.loads(json.dumps(loader.get_state()))
        resumed = self.loader()
        next(resumed)
        resumed.set_state(state)
        assert resumed.get_state() == state
        for _ in range(10):
            assert_batches_equal(next(loader), next(resumed))

    def test_going_back(self):
        loader = self.loader()
        state = loader.get_state()
        first = next(loader)
        next(loader)
        loader.set_state(state)
        assert_batches_equal(first, next(loader))

    def test_resumes_on_another_number_of_processes(self):
        loader = self.loader()
        for _ in range(9):
            next(loader)
        shards = [self.loader(process_index=i, process_count=2) for i in range(2)]
        for shard in shards:
            shard.set_state(loader.get_state())
        assert_batches_equal(next(loader), stack(map(next, shards)))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"seed": 4}, "saved with seed=4, this run has 3"),
            ({"seq_len": 7}, "saved with seq_len=7, this run has 8"),
            ({"batch_size": 8}, "saved with batch_size=8, this run has 4"),
            ({"shuffle": False}, "saved with shuffle=False, this run has True"),
            ({"eos_id": 8888}, "saved with tokens="),
        ],
    )
    def test_state_of_other_data_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            self.loader().set_state(self.loader(**options).get_state())

    @pytest.mark.parametrize(
        ("position", "message"),
        [(-1, "got -1"), ("3", "got '3'"), (None, "got None"), (14, "beyond the end")],
    )
    def test_damaged_state_is_refused(self, position, message):
        loader = self.loader(num_epochs=2)
        with pytest.raises(ValueError, match=message):
            loader.set_state({**loader.get_state(), "next_index": position})


class TestEvaluation:
    @settings(max_examples=100, deadline=None)
    @given(corpora, lengths, st.integers(1, 4), st.data())
    def test_every_target_counts_once_with_enough_context(self, documents, seq_len, batch_size, data):
        overlap = data.draw(st.integers(0, seq_len - 1))
        batches = list(
            evaluation_batches(documents, eos_id=EOS, seq_len=seq_len, batch_size=batch_size, overlap=overlap)
        )
        assert all(array.shape == (batch_size, seq_len) for batch in batches for array in batch.values())
        batch = stack(batches)
        counts = batch["weights"] == 1
        assert (counts | (batch["weights"] == 0)).all()
        assert sorted(batch["targets"][counts].tolist()) == expected_targets(documents)
        assert (batch["segment_ids"][counts] > 0).all()
        # A counted target in the first document of a later row sees `overlap` tokens before its own input.
        later = counts & (np.arange(len(counts)) > 0)[:, None] & (batch["segment_ids"] == 1)
        assert (batch["positions"][later] >= overlap).all()
        stride = seq_len - overlap
        for index, row in enumerate(places(batch)):
            if row:
                assert row == rows_by_lists(documents, seq_len, index * stride)
        used = sum(bool(row) for row in places(batch))
        assert used == 1 + math.ceil(max(0, len(expected_targets(documents)) - seq_len) / stride)
        assert len(batches) == math.ceil(used / batch_size)

    def test_text_shorter_than_a_row(self):
        (batch,) = evaluation_batches([np.array([1, 2])], eos_id=EOS, seq_len=64, batch_size=1)
        assert batch["weights"].sum() == 3

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"overlap": 4}, r"overlap must lie in \[0, seq_len\) = \[0, 4\), got 4"),
            ({"overlap": -1}, "overlap must lie in"),
            ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
            ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ],
    )
    def test_bad_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            evaluation_batches([np.arange(9)], **{"eos_id": EOS, "seq_len": 4, "batch_size": 2, **options})


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"seq_len": 12}, r"seq_len 12 is longer than the corpus \(11 tokens\)"),
            ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
            ({"eos_id": -1}, "eos_id must be a non-negative int32, got -1"),
            ({"batch_size": 0}, "batch_size must be a positive multiple of process_count, got 0 and 1"),
            ({"batch_size": 3, "process_count": 2}, "got 3 and 2"),
            ({"process_index": 1}, r"process_index must lie in \[0, 1\), got 1"),
            ({"seed": -1}, "seed must be non-negative, got -1"),
            ({"num_epochs": 0}, "num_epochs must be at least 1 or None, got 0"),
            ({"prefetch": -1}, "prefetch must be non-negative, got -1"),
        ],
    )
    def test_arguments(self, options, message):
        with pytest.raises(ValueError, match=message) as caught:
            make_loader([np.arange(10)], **{"eos_id": EOS, "seq_len": 4, "batch_size": 2, "seed": 0, **options})
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("documents", "message"),
        [
            ([], "token_docs is empty"),
            ([np.zeros(0, np.int32)], "token_docs is empty"),
            ([np.array([1]), np.array([0.5])], r"token_docs\[1\] must be a one-dimensional integer array"),
            (
                [np.array([[1]])],
                r"token_docs\[0\] must be a one-dimensional integer array, got int64\[1, 1\]",
            ),
            ([np.array([-1])], r"token_docs\[0\] holds ids outside the non-negative int32"),
            ([np.array([2**31])], "outside the non-negative int32"),
        ],
    )
    def test_documents(self, documents, message):
        with pytest.raises(ValueError, match=message):
            PackedDataset(documents, eos_id=EOS, seq_len=1)

    def test_missing_package_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "grain", None)
        monkeypatch.delitem(sys.modules, "jaxlib_icml.training.data")
        with pytest.raises(ImportError, match=r"pip install 'jaxlib-icml\[lm\]'"):
            import jaxlib_icml.training.data  # noqa: F401


def test_bits_per_byte_of_a_uniform_model():
    # A uniform model over 2^k ids on tokens of k/8 bytes codes 8 bits per byte; here 100 tokens of 12 bits.
    assert bits_per_byte(100 * math.log(4096), 150) == pytest.approx(8.0, rel=1e-12)
    with pytest.raises(ValueError, match="num_bytes must be at least 1, got 0"):
        bits_per_byte(1.0, 0)
    with pytest.raises(ValueError, match="total_nats must be finite, got nan"):
        bits_per_byte(float("nan"), 1)
