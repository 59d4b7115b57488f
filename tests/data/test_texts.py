"""Texts reach the tokenizer exactly as files hold them, or a line says what is wrong with which."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from app.choices import BadFile, Source
from app.cli.generate import read_prompts
from app.config import DataConfig
from app.data import documents, json_lines
from app.data.corpus import BATCH_BYTES, LONG, Place, batches
from app.data.faults import Fault, check_utf8, file_text
from app.data.load import load_data, prepare
from app.data.prepared import left_out, map_tokens
from app.data.sources import find_sources, read_otherwise
from app.data.tokenizer import bytes_as_json, load_tokenizer
from app.errors import ConfigError
from tests.data.conftest import write_jsonl

TOKENIZER = load_tokenizer("bytes")
MARK = b"\xef\xbb\xbf"
TIMES = ["2024-03-01T08:30:00Z", "2024-03-01", "2024-03-01 08:30:00.123"]
RAIN = '{"text": "rain"}\n'


def corpus(folder: Path, kind: str, **options: object) -> DataConfig:
    place = {"name": f"{folder}/d"} if kind == "hub" else {"path": (f"{folder}/d/*",)}
    return DataConfig(source=Source(kind), cache_dir=f"{folder}/cache", **(place | options))


def put(folder: Path, *files: bytes | str | pa.Array | pa.Table, name: str = "part.jsonl") -> None:
    """Files of a corpus, in order."""
    (folder / "d").mkdir()
    for number, content in enumerate(files):
        path = folder / f"d/{number}{name}"
        if isinstance(content, pa.Array):
            content = pa.table({"text": content})
        if isinstance(content, pa.Table):
            parquet.write_table(content, path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def read(config: DataConfig) -> list[str]:
    """The documents, by way of the cache."""
    folder = prepare(config, TOKENIZER)
    assert folder
    found = map_tokens(folder)
    sizes = enumerate(found.lengths_D)
    return [TOKENIZER.decode(found.read(n, 0, int(size) - 1).tolist()) for n, size in sizes]


def refused(config: DataConfig) -> str:
    with pytest.raises(ConfigError) as error:
        read(config)
    return str(error.value)


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("kind", ["jsonl", "hub"])
def test_texts_like_times_stay_as_written(kind: str, tmp_path: Path):
    prose = "It rained all day."
    put(tmp_path, *(lines({"text": text}) for text in (prose, *TIMES)))
    config = corpus(tmp_path, kind)
    assert read(config) == [prose, *TIMES]
    if kind == "hub":
        from app.data import hub

        streaming = corpus(tmp_path, kind, streaming=True)
        assert [row["text"] for row in hub.streamed(streaming)] == [prose, *TIMES]


ONE, TWO = {"text": "one"}, {"text": "two"}
OTHERS: dict[str, tuple[str, ...]] = {
    "further key": (lines(ONE), lines({**TWO, "stars": 5})),
    "another type": (lines({**ONE, "id": 1}), lines({**TWO, "id": "b7"})),
    "growing": (lines({**ONE, "m": {"a": 1}}), lines({**TWO, "m": {"b": ["x", {}]}})),
    "null, then text": (lines({**ONE, "by": None}), lines({**TWO, "by": "me"})),
    "null texts first": (lines({"text": None}, {"text": None}), lines(ONE, {"x": 1}, TWO)),
    "blank lines first": ("\n \r\n\n", lines(ONE) + "\n" + lines(TWO)),
    "no bytes first": ("", lines(ONE, TWO)),
    "key twice": ('{"text": "one", "a": 1, "a": "x"}\n', lines(TWO)),
    "odd numbers": ('{"n": 1%s, "f": NaN, "text": "one"}\n' % ("0" * 5000), lines(TWO)),
    "crlf": (lines(ONE, TWO).replace("\n", "\r\n"),),
    "array": (json.dumps([{**ONE, "n": 1}, TWO], indent=1),),
    "last line open": (lines(ONE, TWO).rstrip(),),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", ["jsonl", "hub"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_keys_do_not_matter(kind: str, name: str, tmp_path: Path):
    put(tmp_path, *OTHERS[name])
    assert read(corpus(tmp_path, kind)) == ["one", "two"]


FAULTS = {
    '{"text": 5}': "line 2 holds a number in text, not text",
    '{"text": true}': "line 2 holds true or false in text, not text",
    '{"text": ["a"]}': "line 2 holds a list in text, not text",
    '{"text": {}}': "line 2 holds an object in text, not text",
    r'{"text": "a\ud800b"}': r"line 2 holds half of a character in text: \ud800",
    r'{"text": "\udc00\ud800"}': r"line 2 holds half of a character in text: \udc00",
    '{"text": "a", "text": "b"}': "line 2 has the key text 2 times",
    "[" * 300_000: "line 2 has more brackets within brackets than can be read",
    '{"text": "a"} {}': "line 2 is not JSON: Extra data at character 14",
}


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["jsonl", "hub"])
@pytest.mark.parametrize("line", FAULTS, ids=lambda line: line[:20])
def test_what_is_no_text_is_named_by_line(kind: str, line: str, tmp_path: Path):
    put(tmp_path, RAIN + line + "\n")
    key = "data.name" if kind == "hub" else "data.path"
    told = f"{key}={tmp_path}/d/0part.jsonl: {FAULTS[line]}"
    assert refused(corpus(tmp_path, kind)) == told


def zstd(text: bytes) -> bytes:
    return pa.Codec("zstd").compress(text, asbytes=True)


PACKS = [gzip.compress, bz2.compress, lzma.compress, zstd]


@pytest.mark.parametrize("kind", ["jsonl", "text"])
@pytest.mark.parametrize("pack", PACKS)
def test_compressed_files_are_unpacked(kind: str, pack, tmp_path: Path):
    text = (RAIN * 2).encode()
    packed = pack(MARK + text)
    put(tmp_path, packed)
    found = ["rain"] * 2 if kind == "jsonl" else [RAIN * 2]
    assert read(corpus(tmp_path, kind)) == found
    (tmp_path / "d/0part.jsonl").write_bytes(packed[:-9])
    told = refused(corpus(tmp_path, kind))
    assert "0part.jsonl: is not a whole compressed file" in told
    (tmp_path / "d/1part.jsonl").write_bytes(text)
    config = corpus(tmp_path, kind, on_bad_file=BadFile.skip)
    assert read(config) == found


def test_compressed_lines_are_streamed(tmp_path: Path):
    from app.data import hub

    put(tmp_path, gzip.compress((RAIN * 2).encode()), name="part.jsonl.gz")
    streaming = corpus(tmp_path, "hub", streaming=True)
    assert [row["text"] for row in hub.streamed(streaming)] == ["rain"] * 2


@pytest.mark.skipif(find_spec("zstandard") is not None, reason="zstandard is installed")
def test_streams_of_zstd_name_their_package(tmp_path: Path):
    put(tmp_path, zstd(RAIN.encode()), name="part.jsonl.zst")
    for streaming in (True, False):
        with pytest.raises(ConfigError, match=r"; type pip install zstandard$"):
            config = corpus(tmp_path, "hub", streaming=streaming)
            load_data(config, 8, 1, tokenizer=TOKENIZER)


def test_texts_that_begin_like_packed_ones(tmp_path: Path):
    """Bytes decide, not names; an archive in a packed file is refused."""
    put(tmp_path, "BZh9 is a mark.", name=".gz")
    assert read(corpus(tmp_path, "text")) == ["BZh9 is a mark."]
    (tmp_path / "d/0.gz").write_bytes(gzip.compress(b"a.txt" + bytes(252) + b"ustar\x00" + b"00"))
    assert refused(corpus(tmp_path, "text")).endswith("is a tar archive, not text; unpack it")


@pytest.mark.full
def test_long_lines_are_read_in_parts(monkeypatch: pytest.MonkeyPatch):
    """As Python's parser reads them, wherever parts are cut."""
    monkeypatch.setattr(json_lines, "LARGE", 50)
    monkeypatch.setattr(json_lines, "LONG", 10)
    draw = random.Random(1)
    letters = ["a", "\\", '"', "日", "😀", "\n", "\x07", "é", "/"]
    for _ in range(5000):
        monkeypatch.setattr(json_lines, "PART", draw.choice([30, 37, 50]))
        chances = [draw.random() for _ in letters]
        text = "".join(draw.choices(letters, chances, k=draw.randrange(120)))
        row = {"x": text[:20], "text": text, "y": [text]}
        line = json.dumps(row, ensure_ascii=draw.random() < 0.6).replace("/", "\\/")
        found = json_lines._line_text(line.encode(), "text", set())
        assert (found.decode() if isinstance(found, bytes) else found) == text, line
    for end, told in ((r"\ud83dx", "half of"), (r"\q", "cannot be read"), ("\t", "cannot be read")):
        with pytest.raises(Fault, match=told):
            json_lines._line_text(f'{{"text":"{"a" * 60}{end}"}}'.encode(), "text", set())


SHARD = pa.array(["one", "two"])
SHARDS: dict[str, list[pa.Array]] = {
    "no rows first": [SHARD[:0], SHARD],
    "no rows last": [SHARD, SHARD[:0]],
    "nulls first": [pa.nulls(2), SHARD],
    "nulls of string": [pa.nulls(2, pa.string()), SHARD],
    "nulls of numbers": [SHARD, pa.nulls(2, pa.float64())],
    "large_string": [SHARD.cast(pa.large_string())],
    "string_view": [SHARD.cast(pa.string_view())],
    "dictionary": [SHARD.dictionary_encode()],
    "binary": [SHARD.cast(pa.binary())],
    "rows apart": [pa.array(["one", None, "", "two"])],
}


@pytest.mark.parametrize("name", SHARDS)
def test_parquet_shards_of_every_layout(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_ROWS", 1)
    put(tmp_path, *SHARDS[name], name=".parquet")
    assert read(corpus(tmp_path, "parquet")) == ["one", "two"]


def test_a_parquet_shard_without_text_is_named(tmp_path: Path):
    for number, (content, told) in enumerate(
        (
            (pa.table({"txt": SHARD}), "has no column text; there are txt"),
            (pa.array([1, 2]), "holds int64, not text, in column text"),
            (pa.array([b"x", b"\xff"]), "row 2 is not UTF-8: byte 0xff at offset 0"),
            (RAIN, "is not a whole parquet file: .*; read JSON lines with data.source=jsonl"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        put(folder, SHARD, content, name=".parquet")
        found = refused(corpus(folder, "parquet"))
        assert re.fullmatch(f"data.path={folder}/d/1.parquet: {told}", found)


def test_files_of_another_kind_say_what_to_type(tmp_path: Path):
    put(tmp_path, RAIN, SHARD)
    told = f"data.path={tmp_path}/d/1part.jsonl: is a parquet file"
    for kind, rest in (("jsonl", ""), ("text", ", not text")):
        advice = "; read it with data.source=parquet"
        assert refused(corpus(tmp_path, kind)) == told + rest + advice


def test_a_folder_says_which_pattern_has_its_files(tmp_path: Path):
    put(tmp_path, RAIN)
    told = refused(corpus(tmp_path, "jsonl", path=(f"{tmp_path}/d",)))
    pattern = re.fullmatch(
        r".*/d: is a folder, not a file; give its files: data\.path='(.*)'", told
    )
    assert pattern and read(corpus(tmp_path, "jsonl", path=(pattern[1],))) == ["rain"]
    (tmp_path / "empty").mkdir()
    told = refused(corpus(tmp_path, "text", path=(f"{tmp_path}/empt*",)))
    assert told.endswith("/empt*: matches folders only, without files in it")


@pytest.mark.parametrize("kind", ["text", "jsonl", "hub"])
def test_byte_order_marks_are_no_text(kind: str, tmp_path: Path):
    rain = RAIN if kind != "text" else "rain"
    put(tmp_path, MARK + rain.encode(), rain)
    assert read(corpus(tmp_path, kind)) == ["rain"] * 2
    (tmp_path / "d/1part.jsonl").write_bytes(rain.encode("utf-16"))
    told = "1part.jsonl: is UTF-16, by its byte order mark; convert it to UTF-8"
    assert refused(corpus(tmp_path, kind)).endswith(told)


def test_small_files_and_long_ones_are_checked_alike(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.data.faults.PROBE", 5)
    check_utf8("日本語😀é".encode() * 5)
    with pytest.raises(Fault, match="byte 0xe9 at offset 7"):
        check_utf8("日日".encode() + b"a\xe9")
    assert file_text(MARK + b"a") == "a"
    with pytest.raises(Fault, match="is UTF-32"):
        file_text("a".encode("utf-32"))


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_reads_parquet_that_begins_with_nulls(streaming: bool, tmp_path: Path):
    """A first file without any text has a column of type null, whatever the others have."""
    tables = [pa.table({"id": [1, 2][: len(texts)], "text": texts})
              for texts in (pa.nulls(2), pa.array(["rain", None]), pa.array(["snow"]))]  # fmt: skip
    put(tmp_path, *tables, name="part.parquet")
    config = corpus(tmp_path, "hub", streaming=streaming)
    if not streaming:
        assert read(config) == read(corpus(tmp_path, "parquet")) == ["rain", "snow"]
        return
    from app.data import hub

    assert [row["text"] for row in hub.streamed(config)] == [None, None, "rain", None, "snow"]


SKIP = {"on_bad_file": BadFile.skip}
BAD: dict[str, tuple[str, list[bytes | pa.Array], str]] = {
    "text": ("text", [b"rain", b"\xe9", b"snow"], "is not UTF-8: byte 0xe9 at offset 0"),
    "jsonl": ("jsonl", [RAIN.encode(), b'{"text": "a"}\n{', b'{"text": "snow"}'], "line 2 is not"),
    "parquet": ("parquet", [pa.array(["rain", "snow"]), pa.array([1])], "holds int64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_left_out_whole_and_told(name: str, tmp_path: Path):
    kind, files, told = BAD[name]
    put(tmp_path, *files)
    assert told in refused(corpus(tmp_path, kind))
    config = corpus(tmp_path, kind, **SKIP)
    for _ in ("prepared", "found in the cache"):
        assert read(config) == ["rain", "snow"]
        line = left_out(prepare(config, TOKENIZER), find_sources(config))
        assert line and line.startswith(f"data.on_bad_file=skip: 1 of {len(files)} files left out")
        assert f"/d/1part.jsonl: {told}" in line
    (tmp_path / "d/1part.jsonl").unlink()
    assert left_out(prepare(config, TOKENIZER), find_sources(config)) is None


@pytest.mark.parametrize(("bad", "more"), [(1, ""), (3, ""), (5, "; and 2 more")])
def test_left_out_files_are_named_up_to_three(tmp_path: Path, bad: int, more: str):
    put(tmp_path, "rain", *[b"\xe9"] * bad)
    config = corpus(tmp_path, "text", **SKIP)
    line = left_out(prepare(config, TOKENIZER), find_sources(config))
    assert line is not None and line.count(": is not UTF-8") == min(bad, 3)
    assert line.startswith(f"data.on_bad_file=skip: {bad} of {bad + 1} files left out: ")
    assert line.endswith(f"at offset 0{more}")


def test_nothing_is_left_where_every_file_is_bad(tmp_path: Path):
    put(tmp_path, b"\xe9", b"\xe9")
    assert "no file of 2 can be read: " in refused(corpus(tmp_path, "text", **SKIP))
    with pytest.raises(ConfigError, match="on_bad_file=skip: data=hub reads files through the"):
        corpus(tmp_path, "hub", **SKIP)


def test_documents_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "MOST_BYTES", 2**20)
    for kind in ("text", "jsonl", "parquet"):
        folder = tmp_path / kind
        folder.mkdir()
        long = "x" * (2**20 + 1)
        put(
            folder,
            {"text": long, "jsonl": lines(ONE, {"text": long})}.get(kind) or pa.array([long]),
        )
        told = "has more than 1 MiB, the most that is read; split it"
        assert refused(corpus(folder, kind)).endswith(told)


def test_caches_that_may_be_wrong_are_not_used(tmp_path: Path):
    """Those of JSON and of marked texts; others keep their names."""
    put(tmp_path, MARK + b"rain", "snow")
    marked = find_sources(corpus(tmp_path, "text"))
    (tmp_path / "d/0part.jsonl").write_text("rain")
    plain = find_sources(corpus(tmp_path, "text"))
    assert marked.exact and not plain.exact and "exact" not in plain.record()
    now = find_sources(corpus(tmp_path, "jsonl")).record()
    before = {key: value for key, value in now.items() if key != "exact"}
    assert read_otherwise(before, now) and not read_otherwise(now, now)
    assert not read_otherwise(plain.record(), plain.record())


def test_files_are_sorted_whatever_the_list_says(tmp_path: Path, texts: list[str]):
    for name, part in (("b", texts[:30]), ("a", texts[30:])):
        write_jsonl(tmp_path / f"d/{name}.jsonl", part)
    listed = corpus(tmp_path, "jsonl", path=(f"{tmp_path}/d/b.jsonl", f"{tmp_path}/d/*.jsonl"))
    assert read(listed) == read(corpus(tmp_path, "jsonl")) == [*texts[30:], *texts[:30]]


class Dies:
    """A tokenizer that ends its process."""

    vocab_size, eod = 257, 256

    def encode_documents(self, documents: list[bytes]) -> list[object]:
        raise SystemExit(1)


def test_a_worker_that_dies_is_told(tmp_path: Path, texts: list[str]):
    write_jsonl(tmp_path / "d/a.jsonl", texts)
    with pytest.raises(ConfigError, match=r"data\.num_proc=2: one of these processes has died"):
        load_data(corpus(tmp_path, "jsonl", num_proc=2), 8, 1, tokenizer=Dies())


def test_prompts_begin_behind_a_byte_order_mark(tmp_path: Path):
    for name, line in (("p.txt", b"rain\r\n"), ("p.jsonl", b'{"prompt": "rain"}\n')):
        (tmp_path / name).write_bytes(MARK + line)
        assert read_prompts(tmp_path / name) == ["rain"]
        (tmp_path / name).write_bytes(line.decode().encode("utf-16"))
        with pytest.raises(ConfigError, match=f"file={tmp_path}/{name}: is UTF-16, .* to UTF-8"):
            read_prompts(tmp_path / name)


def test_batches_are_bounded_by_bytes():
    """Small documents fill one, a long one is alone; none is lost."""
    sizes = [5, 2**19, 0, 2**20, 2**19, *[2**18] * 40, 2**24, 1]
    numbered = enumerate(sizes, start=1)
    found = [batch for _, batch in batches((Place(0, n), b"x" * size) for n, size in numbered)]
    assert [len(text) for batch in found for text in batch] == [size for size in sizes if size]
    for batch in found:
        most = BATCH_BYTES + LONG
        assert len(batch) == 1 or (sum(map(len, batch)) < most and max(map(len, batch)) < LONG)


@pytest.mark.parametrize("processes", [1, 2])
def test_long_documents_have_the_tokens_of_short_ones(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In slices, in other processes or this one: as all at once."""
    (tmp_path / "bytes.json").write_text(bytes_as_json())
    long = [f"{number} long 日本語 " * 40 for number in range(9)]
    texts = ["one", *long[:4], "two", "é" * 2000, *long[4:], "three"]
    write_jsonl(tmp_path / "d/a.jsonl", texts)
    for spec in ("bytes", str(tmp_path / "bytes.json")):
        config = corpus(tmp_path, "jsonl", tokenizer=spec, num_proc=processes)
        made = load_tokenizer(spec)
        whole = map_tokens(prepare(config, made))
        for key, value in (("LONG", 500), ("LARGE", 3000), ("BATCH_BYTES", 600)):
            monkeypatch.setattr(f"app.data.corpus.{key}", value)
        for key, value in (("SLICE", 200), ("OVERLAP", 60), ("AT_ONCE", 3)):
            monkeypatch.setattr(f"app.data.slices.{key}", value)
        monkeypatch.setattr("app.data.tokenizer.BYTES_AT_ONCE", 600)
        again = map_tokens(prepare(replace(config, cache_dir=f"{tmp_path}/{processes}"), made))
        monkeypatch.undo()
        assert len(again) == len(whole) == len(texts)
        for number, text in enumerate(texts):
            ids = [*made.encode(text), made.eod]
            for found in (whole, again):
                assert found.read(number, 0, int(found.lengths_D[number])).tolist() == ids


def test_file_without_the_text_key_is_refused_by_name(tmp_path: Path):
    write_jsonl(tmp_path / "d/a.jsonl", ["one"])
    (tmp_path / "d/b.jsonl").write_text('{"content": "two"}\n')
    with pytest.raises(ConfigError, match=r"b.jsonl: has no object with the key text"):
        prepare(corpus(tmp_path, "jsonl"), load_tokenizer("bytes"))


@pytest.mark.parametrize(
    ("path", "kind"),
    [("a.jsonl", "jsonl"), ("A.NDJSON", "jsonl"), ("a.json.gz", "jsonl"), ("b.parquet", "parquet"),
     ("c.md", "text")],
)  # fmt: skip
def test_path_that_no_source_reads_is_refused(path: str, kind: str):
    with pytest.raises(ConfigError, match=rf"is not read by data=stdlib.*data={kind}\?"):
        DataConfig(path=(path,))
    with pytest.raises(ConfigError, match=r"data\.text_field=x: is not read"):
        DataConfig(text_field="x")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_bad_rows_are_left_out_and_counted(kind: str, tmp_path: Path):
    bad = b"caf\xe9"
    if kind == "parquet":
        column = pa.array([b"one", bad, b"two"], pa.binary())
        parquet.write_table(pa.table({"text": column}), tmp_path / "a")
        fault = "row 2 is not UTF-8: byte 0xe9 at offset 3"
    elif kind == "jsonl":
        lines = [b'{"text": "one"}', b'{"text": "' + bad + b'"}', b'{"text"', b'{"text": "two"}']
        (tmp_path / "a").write_bytes(b"\n".join(lines))
        fault = "line 2 is not UTF-8: byte 0xe9 at offset 29"
    else:
        for name, text in (("0", b"one"), ("a", bad), ("b", b"two")):
            (tmp_path / name).write_bytes(text)
        fault = "is not UTF-8: byte 0xe9 at offset 3; convert it to UTF-8"
    stops = DataConfig(source=Source(kind), path=(f"{tmp_path}/*",), cache_dir=f"{tmp_path}/cache")
    with pytest.raises(ConfigError) as error:
        prepare(stops, TOKENIZER)
    assert str(error.value) == f"data.path={tmp_path}/a: {fault}"
    skips = replace(stops, on_bad_file=BadFile.skip_rows)
    folder = prepare(skips, TOKENIZER)
    documents = map_tokens(folder)
    read = [TOKENIZER.decode(documents.read(n, 0, 3).tolist()) for n in range(len(documents))]
    assert read == ["one", "two"]
    rows = "2 rows" if kind == "jsonl" else "1 row"
    said = f"data.on_bad_file=skip_rows: {rows} of 1 file left out: {tmp_path}/a: "
    assert left_out(folder, find_sources(skips)) == said + fault.partition(";")[0]


def test_a_bad_row_group_is_left_out(tmp_path: Path):
    path = tmp_path / "a.parquet"
    texts = [f"{n:03d}" + "x" * 50 for n in range(60)]
    options = {"row_group_size": 20, "compression": "zstd", "use_dictionary": False}
    parquet.write_table(pa.table({"text": texts}), path, **options)
    facts = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    middle = facts.data_page_offset + facts.total_compressed_size // 2
    content[middle - 20 : middle + 20] = bytes(40)
    path.write_bytes(content)
    stops = DataConfig(source=Source.parquet, path=(str(path),), cache_dir=f"{tmp_path}/cache")
    with pytest.raises(ConfigError, match=r"whole parquet file: rows 21 to 40: "):
        prepare(stops, TOKENIZER)
    skips = replace(stops, on_bad_file=BadFile.skip_rows)
    folder = prepare(skips, TOKENIZER)
    assert len(map_tokens(folder)) == 40
    assert (left_out(folder, find_sources(skips)) or "").startswith(
        "data.on_bad_file=skip_rows: 20 rows of 1 file left out: "
    )
