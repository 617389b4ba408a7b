"""Corpora: what is read, what is held out, and what is refused."""

import json
import os
import shutil
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.training.corpus import Corpus, Document, load_corpus, standard_library_corpus


def texts_of(corpus: Corpus) -> dict[str, str]:
    return {document.name: document.text for document in (*corpus.train, *corpus.held_out)}


@pytest.fixture
def folder(tmp_path):
    """Forty files of 100 bytes in two levels, and things that must not be read."""
    root = tmp_path / "root"
    for i in range(40):
        path = root / f"part{i % 4}" / f"file{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{i:02} " + "é" * 48 + "\n")
    (root / ".hidden").write_text("hidden")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden too")
    (root / "empty.txt").write_text("")
    (root / "image.bin").write_bytes(b"\x89PNG\0\0")
    (root / "latin1.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "secret.txt").write_text("outside the folder")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "more.txt").write_text("also outside")
    (root / "linked").symlink_to(outside, target_is_directory=True)
    return root


class TestStandardLibrary:
    def test_documents_and_split(self):
        corpus = standard_library_corpus()
        assert corpus.train_bytes >= 8_000_000
        assert corpus.held_out_bytes >= 300_000
        total = corpus.train_bytes + corpus.held_out_bytes
        assert 0.045 <= corpus.held_out_bytes / total <= 0.05
        root = Path(sysconfig.get_paths()["stdlib"])
        for part in (corpus.train, corpus.held_out):
            names = [document.name for document in part]
            assert names == sorted(names)
            for document in part:
                assert (root / document.name).read_bytes() == document.utf8
        names = texts_of(corpus).keys()
        assert len(names) == len(corpus.train) + len(corpus.held_out)
        assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= names
        skipped = ("test/", "idlelib/", "tkinter/", "site-packages/", "encodings/")
        assert not [name for name in names if name.startswith(skipped) or "/test" in name]

    def test_is_deterministic_and_the_default(self):
        assert load_corpus().fingerprint == standard_library_corpus().fingerprint

    def test_sources_missing(self, monkeypatch, tmp_path):
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
        with pytest.raises(ValueError, match="no standard-library sources below"):
            load_corpus()


class TestFolder:
    def test_reads_text_and_nothing_else(self, folder):
        corpus = load_corpus(folder)
        expected = {f"part{i % 4}/file{i:02}.txt" for i in range(40)}
        assert texts_of(corpus).keys() == expected
        assert corpus.train_bytes + corpus.held_out_bytes == 40 * 100
        assert "skipped 2 binary files and 1 symbolic link" in corpus.description

    @pytest.mark.parametrize(("fraction", "files"), [(0.0, 0), (0.05, 2), (0.1, 4), (0.5, 20)])
    def test_held_out_fraction(self, folder, fraction, files):
        corpus = load_corpus(folder, held_out_fraction=fraction)
        assert len(corpus.held_out) in range(int(0.9 * files), files + 1)
        assert corpus.held_out_bytes <= fraction * 4000
        assert texts_of(corpus).keys() == texts_of(load_corpus(folder)).keys()

    def test_split_does_not_depend_on_the_place(self, folder, tmp_path):
        shutil.copytree(folder, tmp_path / "elsewhere", symlinks=True)
        assert load_corpus(tmp_path / "elsewhere").fingerprint == load_corpus(str(folder)).fingerprint

    def test_fingerprint_sees_contents_names_and_split(self, folder):
        prints = [load_corpus(folder).fingerprint, load_corpus(folder, held_out_fraction=0.2).fingerprint]
        path = folder / "part0" / "file00.txt"
        path.write_text("changed")
        prints.append(load_corpus(folder).fingerprint)
        path.rename(folder / "part0" / "renamed.txt")
        prints.append(load_corpus(folder).fingerprint)
        assert len(set(prints)) == 4

    def test_folder_reached_by_a_link(self, folder, tmp_path):
        (tmp_path / "alias").symlink_to(folder, target_is_directory=True)
        assert load_corpus(tmp_path / "alias").fingerprint == load_corpus(folder).fingerprint

    def test_glob(self, folder, monkeypatch):
        one_level = load_corpus(str(folder / "part1" / "*.txt"), held_out_fraction=0.1)
        assert texts_of(one_level).keys() == {f"file{i:02}.txt" for i in range(1, 40, 4)}
        every_level = load_corpus(str(folder / "**" / "*.txt"))
        assert texts_of(every_level).keys() == texts_of(load_corpus(folder)).keys()
        monkeypatch.chdir(folder)
        assert load_corpus("part?/*.txt").fingerprint == load_corpus(folder).fingerprint

    def test_only_binaries(self, tmp_path):
        (tmp_path / "a.bin").write_bytes(b"\0")
        with pytest.raises(ValueError, match=r"empty corpus, no text found \(skipped 1 binary file\)"):
            load_corpus(tmp_path)

    def test_special_files_are_not_opened(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")  # reading it would wait for a writer
        (tmp_path / "a.txt").write_text("text\n" * 30)
        assert len(load_corpus(tmp_path).train) == 1
        with pytest.raises(ValueError, match="not a regular file"):
            load_corpus(tmp_path / "pipe")


class TestOneFile:
    @settings(max_examples=50, deadline=None)
    @given(st.text(min_size=20, max_size=300), st.floats(0.1, 0.8))
    def test_the_tail_is_held_out(self, tmp_path_factory, text, fraction):
        text = text.replace("\0", "")
        if len(text) < 20:
            text += "x" * 20
        path = tmp_path_factory.mktemp("one") / "book.txt"
        path.write_bytes(text.encode())
        corpus = load_corpus(path, held_out_fraction=fraction)
        assert [document.name for document in corpus.train] == ["book.txt"]
        assert [document.name for document in corpus.held_out] == ["book.txt#tail"]
        assert corpus.train[0].text + corpus.held_out[0].text == text

    def test_cuts_at_a_line(self, tmp_path):
        path = tmp_path / "book.txt"
        path.write_text("".join(f"line {i:03}\n" for i in range(100)))
        (tail,) = load_corpus(path, held_out_fraction=0.055).held_out
        assert tail.text.startswith("line 094\n")

    def test_few_large_files_lose_their_tails(self, tmp_path):
        for name in "ab":
            (tmp_path / f"{name}.txt").write_text(name * 1000)
        corpus = load_corpus(tmp_path, held_out_fraction=0.1)
        assert [(document.name, document.num_bytes) for document in corpus.held_out] == [
            ("a.txt#tail", 100),
            ("b.txt#tail", 100),
        ]

    def test_nothing_held_out(self, tmp_path):
        path = tmp_path / "book.txt"
        path.write_text("text")
        assert load_corpus(path, held_out_fraction=0.0).held_out == ()

    def test_line_ends_survive(self, tmp_path):
        path = tmp_path / "dos.txt"
        path.write_bytes(b"a\r\nb\rc\n" * 10)
        corpus = load_corpus(path)
        assert "".join(texts_of(corpus).values()).encode() == b"a\r\nb\rc\n" * 10


class TestJSONL:
    def write(self, folder: Path, *lines: str) -> Path:
        path = folder / "data.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    def test_one_document_per_line(self, tmp_path):
        lines = [json.dumps({"id": i, "text": f"document {i} é\n", "body": f"b{i}"}) for i in range(50)]
        path = self.write(tmp_path, *lines, "")
        expected = {f"data.jsonl:{i + 1}": f"document {i} é\n" for i in range(50)}
        assert texts_of(load_corpus(path)) == expected
        assert texts_of(load_corpus(tmp_path)) == expected
        assert set(texts_of(load_corpus(path, text_field="body")).values()) == {f"b{i}" for i in range(50)}

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"text": "cut', "line 2: not valid JSON"),
            ("[" * 100_000, "line 2: not valid JSON"),
            ('["text"]', "line 2: expected a JSON object, got list"),
            ('{"body": "b"}', "line 2: no field 'text'; fields present: 'body'"),
            ("{}", "line 2: no field 'text'; fields present: none"),
            ('{"text": 3}', "line 2: field 'text' must be a string, got int"),
            ('{"text": "\\ud800"}', "line 2: field 'text' holds half a surrogate pair"),
        ],
    )
    def test_bad_line(self, tmp_path, line, message):
        path = self.write(tmp_path, '{"text": "good"}', line)
        with pytest.raises(ValueError, match=f"data.jsonl, {message}") as caught:
            load_corpus(path)
        assert "\n" not in str(caught.value)

    def test_only_empty_documents(self, tmp_path):
        with pytest.raises(ValueError, match="empty corpus"):
            load_corpus(self.write(tmp_path, '{"text": ""}'))


class TestBadInput:
    @pytest.mark.parametrize(
        ("contents", "message"),
        [
            (b"", "empty corpus"),
            (b"PK\x03\x04\0\0", "binary file .NUL byte at offset 4"),
            (b"abc\xff", "binary file .invalid UTF-8 at offset 3"),
            (b"x", "too small to hold out"),
        ],
    )
    def test_file(self, tmp_path, contents, message):
        path = tmp_path / "file"
        path.write_bytes(contents)
        with pytest.raises(ValueError, match=message) as caught:
            load_corpus(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
    def test_fraction(self, fraction):
        with pytest.raises(ValueError, match=r"held_out_fraction must be in \[0, 1\), got"):
            load_corpus(held_out_fraction=fraction)

    def test_missing(self, tmp_path):
        with pytest.raises(ValueError, match="no such file or folder"):
            load_corpus(tmp_path / "missing")
        with pytest.raises(ValueError, match="empty corpus"):
            load_corpus(str(tmp_path / "*.txt"))
        with pytest.raises(ValueError, match="path is empty"):
            load_corpus("")

    def test_dangling_link(self, tmp_path):
        (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=r"empty corpus, no text found \(skipped 1 symbolic link\)"):
            load_corpus(tmp_path)


def test_document_counts_bytes_not_characters():
    assert Document("a", "é🙂").num_bytes == 6
