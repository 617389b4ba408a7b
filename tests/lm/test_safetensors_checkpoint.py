"""Checkpoints of several files: the index and the files must agree, and writing leaves all or nothing."""

import json
import os
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlib_icml.lm.safetensors import SafetensorsFile, open_checkpoint, write_checkpoint
from jaxlib_icml.lm.safetensors.checkpoint import parse_index

TENSORS = {
    "embed": np.arange(12, dtype=np.float32).reshape(4, 3),
    "scale": np.array([1.5, -2.5], ml_dtypes.bfloat16),
    "ids": np.arange(5, dtype=np.int64),
    "flag": np.array(True),
    "empty": np.zeros((0, 7), np.float16),
}


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def shards(folder, **files):
    """A folder of files `{name: (tensors it really has, tensors that the index puts there)}`."""
    weight_map = {}
    for name, (real, listed) in files.items():
        [path] = write_checkpoint(folder / "make", [(tensor, np.zeros(2)) for tensor in real], overwrite=True)
        path.rename(folder / f"{name}.safetensors")
        weight_map |= dict.fromkeys(listed, f"{name}.safetensors")
    (folder / "make").rmdir()
    write_index(folder, weight_map)


def write_index(folder, weight_map, text=None):
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}) if text is None else text
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def assert_holds(folder, wanted, **kwargs):
    checkpoint = open_checkpoint(folder, **kwargs)
    assert set(checkpoint.names()) == set(wanted)
    for name, array in wanted.items():
        got = checkpoint.read_finite(name)
        assert got.dtype == array.dtype
        assert got.shape == array.shape == checkpoint.info(name).shape
        assert got.tobytes() == np.asarray(array).tobytes()


class TestRoundTrip:
    def test_one_file(self, tmp_path):
        files = write_checkpoint(tmp_path / "new" / "folder", TENSORS.items())
        assert listing(tmp_path / "new" / "folder") == ["model.safetensors"]
        assert_holds(tmp_path / "new" / "folder", TENSORS)
        assert_holds(files[0], TENSORS)
        header = files[0].read_bytes()
        assert int.from_bytes(header[:8], "little") % 8 == 0

    @pytest.mark.parametrize("limit", [1, 44, 48, 52, 91, 92])
    def test_several_files(self, tmp_path, limit):
        files = write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=limit)
        assert_holds(tmp_path, TENSORS)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in TENSORS.values())
        assert listing(tmp_path) == sorted({*index["weight_map"].values(), "model.safetensors.index.json"})
        for i, path in enumerate(files):
            assert path.name == f"model-{i + 1:05}-of-{len(files):05}.safetensors"
            sizes = [info.stop - info.start for info in SafetensorsFile(path).tensors.values()]
            assert sum(sizes) <= limit or len(sizes) - sizes.count(0) == 1

    def test_the_limit_is_inclusive(self, tmp_path):
        total = sum(array.nbytes for array in TENSORS.values())
        assert len(write_checkpoint(tmp_path / "a", TENSORS.items(), max_shard_bytes=total)) == 1
        assert len(write_checkpoint(tmp_path / "b", TENSORS.items(), max_shard_bytes=total - 1)) == 2

    def test_arrays_of_every_kind(self, tmp_path):
        base = np.random.default_rng(0).standard_normal((40, 60, 3))
        kinds = {
            "transposed": base.T,
            "strided": base[::-2, ::3, 1],
            "big-endian": base.astype(">f8"),
            "broadcast": np.broadcast_to(np.float32(2.5), (300, 200)),
            "jax": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
            "jax-sharded": jax.device_put(
                jnp.arange(8.0), jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x"))
            ),
        }
        made = ("made", (2, 60), np.float64, lambda: base[:2, :, 0])
        write_checkpoint(tmp_path, [*kinds.items(), made, ("list", [1.0, 2.0])])
        checkpoint = open_checkpoint(tmp_path)
        for name, array in kinds.items():
            np.testing.assert_array_equal(checkpoint.read(name), np.asarray(array))
        np.testing.assert_array_equal(checkpoint.read("made"), base[:2, :, 0])
        np.testing.assert_array_equal(checkpoint.read("list"), [1.0, 2.0])

    @pytest.mark.parametrize("shape", [(3_000_001,), (1, 1, 1_500_000), (3, 700_000), (700_000, 3), (1, 3, 2, 300_000)])
    def test_large_arrays_are_written_in_parts(self, tmp_path, shape):
        array = np.random.default_rng(0).standard_normal(shape[::-1], np.float32).T
        write_checkpoint(tmp_path, [("x", array)])
        np.testing.assert_array_equal(open_checkpoint(tmp_path).read("x"), array)

    def test_metadata(self, tmp_path):
        write_checkpoint(tmp_path / "a", TENSORS.items(), max_shard_bytes=60, metadata={"note": "é", "format": "flax"})
        assert open_checkpoint(tmp_path / "a").metadata == {"note": "é", "format": "flax"}
        write_checkpoint(tmp_path / "b", TENSORS.items(), metadata={"a": ""})
        assert open_checkpoint(tmp_path / "b").metadata == {"format": "pt", "a": ""}

    def test_other_files_of_the_folder_do_not_matter(self, tmp_path):
        write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=60)
        (tmp_path / "consolidated.safetensors").write_bytes(b"nonsense")
        (tmp_path / "pytorch_model.bin").write_bytes(b"nonsense")
        assert_holds(tmp_path, TENSORS)

    def test_one_tensor_in_memory_at_a_time(self, tmp_path):
        size = 4_000_000
        tensors = [(f"x{i}", (size // 4,), np.float32, lambda i=i: np.full(size // 4, i, np.float32)) for i in range(8)]
        tracemalloc.start()
        write_checkpoint(tmp_path, tensors, max_shard_bytes=3 * size)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert size < peak < 2.5 * size
        assert open_checkpoint(tmp_path).read("x5")[-1] == 5

    @pytest.mark.peer
    def test_the_library_reads_the_parts(self, tmp_path):
        torch = pytest.importorskip("torch")
        loading = pytest.importorskip("safetensors.torch")
        files = write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=60)
        found = {name: tensor for path in files for name, tensor in loading.load_file(path).items()}
        assert set(found) == set(TENSORS)
        for name, wanted in TENSORS.items():
            assert torch.equal(found[name].double(), torch.from_numpy(wanted.astype(np.float64)))


class TestRefusedToWrite:
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
    def test_numbers_that_are_not_finite(self, tmp_path, value, dtype):
        array = np.zeros((3, 5), dtype)
        array[2, 1] = value
        with pytest.raises(ValueError, match=r"tensors: 'layer\.bad': .* must be finite"):
            write_checkpoint(tmp_path, [("good", np.zeros(3)), ("layer.bad", array)])
        assert listing(tmp_path) == []

    @pytest.mark.parametrize(
        ("array", "dtype"),
        [
            (np.array([None]), "object"),
            (np.array(["a"]), "<U1"),
            (np.zeros(2, np.complex64), "complex64"),
            (np.zeros(2, [("a", "f4")]), "'a'"),
            (np.zeros(2, "M8[s]"), "datetime64"),
            (np.zeros(2, ml_dtypes.int4), "int4"),
            (jax.random.key(0), "key<fry>"),
        ],
    )
    def test_dtypes_that_the_format_lacks(self, tmp_path, array, dtype):
        with pytest.raises(ValueError, match=f"tensors: 'x': dtype .*{dtype}.* is none of bool, uint8"):
            write_checkpoint(tmp_path, [("x", array)])

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ([("x", np.zeros(1)), ("x", np.ones(1))], "'x' is given twice"),
            ([("__metadata__", np.zeros(1))], "'__metadata__' is reserved"),
            ([(3, np.zeros(1))], "name must be a non-empty text, got 3"),
            ([("", np.zeros(1))], "name must be a non-empty text"),
            ([("\ud800", np.zeros(1))], "half a surrogate pair"),
            ([], "nothing to write"),
            (["ab", "abcd"], "expected \\(name, array\\)"),
            ([("x", (2,), np.float32)], "expected \\(name, array\\)"),
            ([("x", (2,), np.float32, 3)], "'x': the fourth entry must be a function"),
            ([("x", (-2,), np.float32, lambda: 0)], "'x': shape must hold sizes"),
            ([("x", (True,), np.float32, lambda: 0)], "'x': shape must hold sizes"),
            ([("x", (2,), np.float32, lambda: np.zeros(3, np.float32))], "'x': announced as float32 \\(2,\\), made as"),
            ([("x", (2,), np.float32, lambda: np.zeros(2))], "'x': announced as float32 .*, made as float64"),
        ],
    )
    def test_other_tensors(self, tmp_path, tensors, message):
        with pytest.raises(ValueError, match=message):
            write_checkpoint(tmp_path, iter(tensors))
        assert listing(tmp_path) == []

    @pytest.mark.parametrize("wrong", [{"a": 1}, {1: "a"}, {"": "a"}, {"a": "\ud800"}])
    def test_metadata_that_is_not_text(self, tmp_path, wrong):
        with pytest.raises(ValueError, match="metadata: "):
            write_checkpoint(tmp_path, TENSORS.items(), metadata={"good": "text"} | wrong)

    def test_shards_of_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="max_shard_bytes must be at least 1, got 0"):
            write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=0)

    @pytest.mark.parametrize("limit", [60, 10_000])
    def test_a_folder_that_is_taken(self, tmp_path, limit):
        write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=limit)
        before = listing(tmp_path)
        with pytest.raises(ValueError, match=r"already holds model\.safetensors.*overwrite=True"):
            write_checkpoint(tmp_path, [("x", np.zeros(3))])
        assert listing(tmp_path) == before
        assert_holds(tmp_path, TENSORS)


class TestOverwriting:
    @pytest.mark.parametrize("old", [40, 60, 10_000])
    @pytest.mark.parametrize("new", [40, 60, 10_000])
    def test_nothing_of_the_old_checkpoint_stays(self, tmp_path, old, new):
        write_checkpoint(tmp_path, [("other", np.zeros(100)), *TENSORS.items()], max_shard_bytes=old)
        (tmp_path / "config.json").write_text("{}")
        files = write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=new, overwrite=True)
        assert_holds(tmp_path, TENSORS)
        marks = {"config.json", *([] if len(files) == 1 else ["model.safetensors.index.json"])}
        assert set(listing(tmp_path)) == marks | {path.name for path in files}

    def test_a_checkpoint_may_be_rewritten_from_itself(self, tmp_path):
        write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=60)
        checkpoint = open_checkpoint(tmp_path)
        write_checkpoint(tmp_path, [(name, checkpoint.read(name)) for name in checkpoint.names()], overwrite=True)
        assert listing(tmp_path) == ["model.safetensors"]
        assert_holds(tmp_path, TENSORS)

    @pytest.mark.parametrize("limit", [60, 10_000])
    def test_a_failure_leaves_the_old_one(self, tmp_path, limit):
        write_checkpoint(tmp_path, TENSORS.items(), max_shard_bytes=limit)
        before = listing(tmp_path)

        def fails():
            raise RuntimeError("out of luck")

        tensors = [("a", np.zeros(30)), ("b", (30,), np.float64, fails)]
        with pytest.raises(RuntimeError, match="out of luck"):
            write_checkpoint(tmp_path, tensors, max_shard_bytes=limit, overwrite=True)
        assert listing(tmp_path) == before
        assert_holds(tmp_path, TENSORS)

    @pytest.mark.parametrize("old", [60, 10_000])
    @pytest.mark.parametrize("new", [60, 10_000])
    def test_a_crash_at_any_rename_leaves_a_whole_checkpoint_or_none(self, tmp_path, monkeypatch, old, new):
        class Crash(BaseException):
            pass

        real = os.replace
        for survived in range(10):
            folder = tmp_path / str(survived)
            write_checkpoint(folder, [("other", np.zeros(8)), *TENSORS.items()], max_shard_bytes=old)
            count = iter(range(survived))

            def replace(source, target, count=count):
                if next(count, None) is None:
                    raise Crash
                real(source, target)

            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", replace)
                try:
                    write_checkpoint(folder, TENSORS.items(), max_shard_bytes=new, overwrite=True)
                except Crash:
                    crashed = True
                else:
                    crashed = False
            if not crashed:
                assert_holds(folder, TENSORS)
                assert survived >= 1
                return
            if not any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
                continue  # no checkpoint, and nothing that looks like one
            assert set(open_checkpoint(folder).names()) in ({"other", *TENSORS}, set(TENSORS))
        pytest.fail("writing never finished")

    def test_the_folder_gets_ordinary_permissions(self, tmp_path):
        plain = tmp_path / "plain"
        plain.write_bytes(b"")
        [path] = write_checkpoint(tmp_path / "x", TENSORS.items())
        assert path.stat().st_mode == plain.stat().st_mode


ELSEWHERE = (
    *("../out.safetensors", "/etc/out.safetensors", "sub/a.safetensors", "a.safetensors/", "..", ".", ""),
    *("a.bin", "a.pt", ".a.safetensors", "a\0.safetensors", "a\n.safetensors"),
    *("C:a.safetensors", "\\a.safetensors", "..\\a.safetensors"),
)


class TestIndex:
    def test_a_consistent_folder_opens(self, tmp_path):
        shards(tmp_path, a=(["x", "y"], ["x", "y"]), b=(["z"], ["z"]))
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.names() == ("x", "y", "z")
        assert checkpoint.file("z").path.name == "b.safetensors"
        with pytest.raises(ValueError, match="no tensor 'w'"):
            checkpoint.read("w")

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"a": (["x"], ["x", "y"])}, r"index.json: tensor 'y' is not in a.safetensors"),
            ({"a": (["x", "y"], ["x"])}, r"a.safetensors: tensor 'y' is not in model.safetensors.index.json"),
            ({"a": (["x"], ["x", "z"]), "b": (["z"], [])}, r"index.json: tensor 'z' is not in a.safetensors"),
            ({"a": (["x"], ["y"]), "b": (["y"], ["x"])}, r"index.json: tensor 'y' is not in a.safetensors"),
            ({"a": (["x"], ["x"]), "b": (["x", "y"], ["y"])}, r"b.safetensors: tensor 'x' is also in a.safetensors"),
        ],
    )
    def test_index_and_files_must_agree(self, tmp_path, files, message):
        shards(tmp_path, **files)
        with pytest.raises(ValueError, match=message):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("shard", ELSEWHERE)
    def test_names_that_lead_elsewhere(self, tmp_path, shard):
        folder = tmp_path / "folder"
        (folder / "sub").mkdir(parents=True)
        for place in (tmp_path / "out.safetensors", folder / "sub" / "a.safetensors", folder / ".a.safetensors"):
            [path] = write_checkpoint(tmp_path / "make", [("x", np.zeros(2))], overwrite=True)
            path.rename(place)
        write_index(folder, {"x": shard})
        with pytest.raises(
            ValueError, match=r"index\.json: tensor 'x': .* is not the plain name of a \.safetensors file"
        ):
            open_checkpoint(folder, follow_symlinks=True)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "expected '{'"),
            ("[]", "expected '{'"),
            ("{}", "weight_map names no tensors"),
            ('{"weight_map": {}}', "weight_map names no tensors"),
            ('{"weight_map": []}', "expected '{'"),
            ('{"weight_map": {"x": 1}}', "tensor 'x': expected a string"),
            ('{"weight_map": {"x": null}}', "tensor 'x': expected a string"),
            ('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}', "key 'x' is given twice"),
            ('{"weight_map": {}, "weight_map": {}}', "key 'weight_map' is given twice"),
            ('{"weight_map": {"x": "a.safetensors"}', "expected ','"),
            ('{"weight_map": {"x": "a.safetensors"}} 1', "expected the end"),
            ('{"metadata": NaN}', "expected a value"),
            ('{"metadata": ' + "[" * 1000, "nested deeper"),
            ('{"weight_map": {"x": "missing.safetensors"}}', "tensor 'x': no file 'missing.safetensors' in the folder"),
        ],
    )
    def test_texts_that_are_no_index(self, tmp_path, text, message):
        write_index(tmp_path, {}, text)
        with pytest.raises(ValueError, match=rf"index\.json: .*{message}"):
            open_checkpoint(tmp_path)

    def test_not_utf8(self):
        with pytest.raises(ValueError, match="where: not UTF-8 at byte 1"):
            parse_index(b"{\xff}", "where")

    def test_a_shard_that_lies_is_named(self, tmp_path):
        shards(tmp_path, a=(["x"], ["x"]), b=(["y"], ["y"]))
        path = tmp_path / "b.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ValueError, match=r"b\.safetensors: tensor 'y': data_offsets"):
            open_checkpoint(tmp_path)

    def test_folders_that_are_no_checkpoint(self, tmp_path):
        with pytest.raises(ValueError, match=r"holds neither model\.safetensors nor"):
            open_checkpoint(tmp_path)
        with pytest.raises(ValueError, match="missing: no such file or folder"):
            open_checkpoint(tmp_path / "missing")
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: not a folder and not a \.safetensors file"):
            open_checkpoint(tmp_path / "pytorch_model.bin")
        write_checkpoint(tmp_path, TENSORS.items())
        write_index(tmp_path, {"x": "model.safetensors"})
        with pytest.raises(ValueError, match=r"holds both model\.safetensors and model\.safetensors\.index\.json"):
            open_checkpoint(tmp_path)


class TestLinks:
    """A snapshot folder of Hugging Face's cache, whose files are links to `../../blobs`."""

    @pytest.fixture
    def snapshot(self, tmp_path):
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        files = write_checkpoint(blobs, TENSORS.items(), max_shard_bytes=60)
        for path in [*files, blobs / "model.safetensors.index.json"]:
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        return snapshot

    def test_links_that_leave_the_folder_need_leave(self, snapshot):
        with pytest.raises(ValueError, match=r"index\.json: links to .*blobs.*, outside .*follow_symlinks=True"):
            open_checkpoint(snapshot)
        assert_holds(snapshot, TENSORS, follow_symlinks=True)

    def test_one_linked_shard_is_enough_to_refuse(self, snapshot):
        index = snapshot / "model.safetensors.index.json"
        text = index.read_bytes()
        index.unlink()
        index.write_bytes(text)
        with pytest.raises(ValueError, match=r"model-00001-of-0000\d\.safetensors: links to"):
            open_checkpoint(snapshot)

    def test_a_linked_model_file(self, tmp_path):
        [path] = write_checkpoint(tmp_path / "blobs", TENSORS.items())
        (tmp_path / "snapshot").mkdir()
        (tmp_path / "snapshot" / "model.safetensors").symlink_to(path)
        with pytest.raises(ValueError, match=r"model\.safetensors: links to"):
            open_checkpoint(tmp_path / "snapshot")
        assert_holds(tmp_path / "snapshot", TENSORS, follow_symlinks=True)
        # Who names a link means it.
        assert_holds(tmp_path / "snapshot" / "model.safetensors", TENSORS)

    def test_links_inside_the_folder_and_to_the_folder(self, tmp_path):
        shards(tmp_path, real=(["x"], ["x"]))
        (tmp_path / "a.safetensors").symlink_to("real.safetensors")
        write_index(tmp_path, {"x": "a.safetensors"})
        assert open_checkpoint(tmp_path).names() == ("x",)
        (tmp_path / "link").symlink_to(tmp_path)
        assert open_checkpoint(tmp_path / "link").names() == ("x",)

    @pytest.mark.parametrize("follow", [False, True])
    @pytest.mark.parametrize("target", ["model.safetensors", "nowhere", "/dev/zero", "."])
    def test_links_to_what_is_no_file(self, tmp_path, target, follow):
        (tmp_path / "model.safetensors").symlink_to(target)
        with pytest.raises(ValueError, match=r"model\.safetensors: "):
            open_checkpoint(tmp_path, follow_symlinks=follow)

    def test_writing_replaces_a_link_and_not_its_target(self, tmp_path):
        [path] = write_checkpoint(tmp_path / "blobs", TENSORS.items())
        before = path.read_bytes()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "model.safetensors").symlink_to(path)
        write_checkpoint(tmp_path / "folder", [("x", np.zeros(2))], overwrite=True)
        assert path.read_bytes() == before
        assert not (tmp_path / "folder" / "model.safetensors").is_symlink()
