from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from app.choices import Source
from app.config import DataConfig
from app.data import hub
from app.data.baseline import ngram_loss
from app.data.documents import documents
from app.data.faults import Reading
from app.data.feed import Cursor, TrainFeed
from app.data.load import load_data, prepare
from app.data.packing import Documents
from app.data.paths import stdlib_files
from app.data.prepared import map_tokens, prepare_tokens
from app.data.sources import find_sources
from app.data.tokenizer import Tokenizer, load_tokenizer
from app.errors import ConfigError

TOKENIZER = load_tokenizer("bytes")


def tokenized(config: DataConfig, tokenizer: Tokenizer) -> Documents:
    """The documents by way of the cache, as every start reads them."""
    return map_tokens(prepare_tokens(config, tokenizer, find_sources(config), say=print))


def texts_of(documents: Documents) -> list[str]:
    read = [documents.read(d, 0, int(n)) for d, n in enumerate(documents.lengths_D)]
    assert all(ids[-1] == TOKENIZER.eod and TOKENIZER.eod not in ids[:-1] for ids in read)
    return [TOKENIZER.decode(ids) for ids in read]


def write(kind: str, folder: Path, texts: list[str | None]) -> DataConfig:
    """The texts as two files of a kind."""
    folder.mkdir(parents=True, exist_ok=True)
    half = len(texts) // 2
    for name, part in (("a", texts[:half]), ("b", texts[half:])):
        table = pa.table({"id": pa.array(range(len(part))), "text": pa.array(part, pa.string())})
        if kind == "parquet":
            parquet.write_table(table, folder / f"{name}.parquet")
        elif kind == "text":
            for i, text in enumerate(part):
                (folder / f"{name}{i:03d}.text").write_text(text or "")
        else:
            datasets.Dataset(table).to_json(folder / f"{name}.jsonl")
    options = {"name": str(folder)} if kind == "hub" else {"path": [str(folder / f"*.{kind}")]}
    return DataConfig(source=Source(kind), cache_dir=str(folder.parent / "cache"), **options)


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()  # for `to_json` above; the corpus does it itself


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "hub"])
def test_every_source_gives_its_documents(
    kind: str, tmp_path: Path, texts: list[str], capfd: pytest.CaptureFixture[str]
):
    config = write(kind, tmp_path / "data", [texts[0], "", *texts[1:], "naïve — 雪\r\n\n"])
    documents = tokenized(config, TOKENIZER)
    assert texts_of(documents) == [*texts, "naïve — 雪\r\n\n"]
    assert documents.chunks[0].dtype == np.uint16
    assert not documents.chunks[0].flags.writeable  # memory-mapped
    assert texts_of(tokenized(config, TOKENIZER)) == texts_of(documents)
    assert "".join(capfd.readouterr()) == ""
    train, validation = load_data(config, 16, 1, tokenizer=TOKENIZER)
    assert train.sequences.num_tokens + validation.sequences.num_tokens == documents.lengths_D.sum()
    assert train.boundary is validation.boundary is None


def test_null_texts_count_as_empty(tmp_path: Path):
    for kind in ("jsonl", "parquet"):
        config = write(kind, tmp_path / kind, ["one", None, "two", "", "three", None])
        assert texts_of(tokenized(config, TOKENIZER)) == ["one", "two", "three"]


def test_streaming_and_prepared_agree_on_the_documents(
    stream_config: Callable[..., DataConfig], texts: list[str]
):
    streaming = stream_config([texts[:20], texts[20:]])
    prepared = DataConfig(source=Source.hub, name=streaming.name, cache_dir=streaming.cache_dir)
    assert (
        [row["text"] for row in hub.streamed(streaming)]
        == texts_of(tokenized(prepared, TOKENIZER))
        == texts
    )


def test_slices_of_a_split(tmp_path: Path, texts: list[str]):
    config = write("hub", tmp_path / "data", texts)
    part = DataConfig(
        source=Source.hub, name=config.name, split="train[50%:]", cache_dir=config.cache_dir
    )
    assert texts_of(tokenized(part, TOKENIZER)) == texts[30:]


def test_split_depends_on_the_documents_only(tmp_path: Path, texts: list[str]):
    config = write("jsonl", tmp_path / "data", texts)
    splits = [load_data(config, 16, seed, tokenizer=TOKENIZER) for seed in (1, 2, 1)]
    validation = [TOKENIZER.decode(v.sequences.tokens(10**6)) for _, v in splits]
    assert validation[0] == validation[1] == validation[2]
    held = {text for text in texts if text in validation[0]}
    assert held == {texts[i] for i in range(5, 60, 10)}
    train = TOKENIZER.decode(splits[0][0].sequences.tokens(10**6))
    assert all((text in train) != (text in held) for text in texts)


def test_changed_files_and_tokenizers_make_new_entries(tmp_path: Path, texts: list[str]):
    for kind in ("text", "jsonl", "parquet", "hub"):
        config = write(kind, tmp_path / kind, texts)
        assert texts_of(tokenized(config, TOKENIZER)) == texts
        changed = ["new " + text for text in texts]
        write(kind, tmp_path / kind, changed)
        for file in (tmp_path / kind).iterdir():
            os.utime(file, (time.time() + 10, time.time() + 10))
        assert texts_of(tokenized(config, TOKENIZER)) == changed, kind
    from tokenizers import Tokenizer, models, pre_tokenizers

    for number, end in enumerate(("</s>", "<eos>")):
        words = Tokenizer(models.WordLevel({"new": 0, "?": 1, end: 70_000 + number}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.add_special_tokens([end])
        words.save(str(tmp_path / "words.json"))
        documents = tokenized(config, load_tokenizer(str(tmp_path / "words.json")))
        assert (
            documents.read(0, 0, 9)[0] == 0
            and documents.read(0, 0, int(documents.lengths_D[0]))[-1] == 70_000 + number
        )
        assert documents.chunks[0].dtype == np.int32


def test_several_processes_tokenize(tmp_path: Path, texts: list[str]):
    config = write("text", tmp_path / "data", texts)
    two = DataConfig(source=Source.text, path=config.path, cache_dir=config.cache_dir, num_proc=2)
    assert texts_of(tokenized(two, TOKENIZER)) == texts
    assert texts_of(tokenized(config, TOKENIZER)) == texts


def _prepare_in_child(config: DataConfig, start: Event, results: Queue):
    start.wait()
    results.put(texts_of(tokenized(config, TOKENIZER)))


def test_ranks_that_prepare_at_once_do_not_spoil_the_cache(tmp_path: Path, texts: list[str]):
    config = write("jsonl", tmp_path / "data", texts * 20)
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    ranks = [
        context.Process(target=_prepare_in_child, args=(config, start, results)) for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    start.set()
    assert [results.get(timeout=600) for _ in ranks] == [texts * 20] * 3
    for rank in ranks:
        rank.join()
    assert texts_of(tokenized(config, TOKENIZER)) == texts * 20


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "hub"])
def test_prepare_leaves_nothing_to_write(kind: str, tmp_path: Path, texts: list[str]):
    config = write(kind, tmp_path / "data", texts)

    def written():
        return {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.arrow")}

    prepare(config, TOKENIZER)
    before = written()
    load_data(config, 16, 1, tokenizer=load_tokenizer("bytes"))
    assert len(before) == 1 and written() == before


def test_one_large_file_is_a_corpus(tmp_path: Path):
    (tmp_path / "book.txt").write_text("all happy families are alike " * 100)
    config = DataConfig(
        source=Source.text, path=(str(tmp_path / "book.txt"),), cache_dir=str(tmp_path / "cache")
    )
    train, validation = load_data(config, 32, 1, tokenizer=TOKENIZER)
    assert (train.sequences.num_tokens, validation.sequences.num_tokens) == (2610, 291)


def test_names_with_wildcards_are_plain_names(tmp_path: Path):
    config = write("jsonl", tmp_path / "a[1]*", ["one", "two"])
    odd = DataConfig(
        source=Source.jsonl,
        path=(str(tmp_path / "a[[]1]*" / "?.jsonl"),),
        cache_dir=config.cache_dir,
    )
    assert texts_of(tokenized(odd, TOKENIZER)) == ["one", "two"]


def test_undecodable_files(tmp_path: Path):
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    replaced = documents(str(tmp_path / "latin.py"), DataConfig(source=Source.stdlib), Reading())
    assert [text.decode() for text in replaced] == ["# caf\ufffd\n"]
    error = load_error(
        source=Source.text, path=(str(tmp_path / "*.py"),), cache_dir=str(tmp_path / "cache")
    )
    assert str(error).startswith(
        f"data.path={tmp_path}/latin.py: is not UTF-8: byte 0xe9 at offset 5"
    )


def test_document_mask_sets_the_boundary(tmp_path: Path, texts: list[str]):
    config = write("jsonl", tmp_path / "data", texts)
    masked = DataConfig(
        source=config.source, path=config.path, cache_dir=config.cache_dir, document_mask=True
    )
    train, validation = load_data(masked, 64, 1, tokenizer=TOKENIZER)
    assert train.boundary == validation.boundary == TOKENIZER.eod
    batch = TrainFeed(train, 0, 1, micro_batch=2, num_microbatches=1, cursor=Cursor()).next_step()[
        0
    ]
    assert (batch.ends_BD[:, 0] < 64).all() and (batch.labels_BS == -100).sum() == (
        batch.tokens_BS == TOKENIZER.eod
    ).sum()


# Errors


def load_error(**options: object) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load_data(DataConfig(**options), 16, 1, tokenizer=TOKENIZER)
    return error.value


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_a_pattern_without_files(source: str, tmp_path: Path):
    (tmp_path / "train.json").write_text("")
    error = load_error(source=Source(source), path=(str(tmp_path / "trian.json"),))
    assert error.key == "data.path" and "trian.json: matches no file" in str(error)
    assert error.guess == str(tmp_path / "train.json")
    error = load_error(source=Source(source), path=(str(tmp_path / "deep" / "train.json*"),))
    assert (
        f"matches no file: there is no folder {tmp_path / 'deep'}" in str(error)
        and error.guess is None
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_a_missing_or_wrong_column(kind: str, tmp_path: Path, texts: list[str]):
    config = write(kind, tmp_path / "data", texts)
    source_option = {
        "source": config.source,
        "path": config.path,
        "name": config.name,
        "cache_dir": config.cache_dir,
    }
    for streaming in (False, True) if kind == "hub" else (False,):
        error = load_error(**source_option, streaming=streaming, text_field="txt")
        assert "data.text_field=txt: no such column; there are id, text; did you mean text?" in str(
            error
        )
        error = load_error(**source_option, streaming=streaming, text_field="id")
        told = "data.text_field=id: holds int64, not text"
        if kind != "parquet":
            told = "data/a.jsonl: line 1 holds a number in id, not text"
        assert told in str(error)


def test_files_that_are_not_what_they_should_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "x.parquet").write_text("no")
    for source in ("jsonl", "parquet"):
        error = load_error(
            source=Source(source),
            path=(str(tmp_path / f"x.{source}"),),
            cache_dir=str(tmp_path / "cache"),
        )
        assert error.value == str(tmp_path / f"x.{source}") and error.rule.startswith(
            ("line 2 is not JSON", "is not a whole")
        )
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_errors_give_the_reason(
    streaming: bool, tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
):
    folder = write("hub", tmp_path / "data", texts).name
    options = {"source": Source.hub, "streaming": streaming, "cache_dir": str(tmp_path / "cache")}
    assert "split=valid): cannot be loaded: ValueError" in str(
        load_error(**options, name=folder, split="valid")
    )
    assert "'small' not found. Available: ['default']" in str(
        load_error(**options, name=folder, config_name="small")
    )
    error = load_error(**options, name=str(tmp_path / "dta"))
    assert "no such folder" in str(error) and error.guess == folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    error = load_error(**options, name="someone/something")
    said = "is not in the cache, and https://huggingface.co cannot be reached"
    assert error.key == "data.name" and said in str(error)


def test_no_text_at_all(tmp_path: Path):
    (tmp_path / "a.text").write_text("")
    error = load_error(
        source=Source.text, path=(str(tmp_path / "a.text"),), cache_dir=str(tmp_path / "cache")
    )
    assert str(error) == f"data.path={tmp_path / 'a.text'}: no text in any of its 1 documents"


def test_too_short_for_a_sequence_names_the_split(tmp_path: Path, texts: list[str]):
    config = write("jsonl", tmp_path / "data", texts)
    with pytest.raises(
        ConfigError,
        match=r"train\.seq_len=1000: the validation split has only \d+ tokens, .* needs 1001, and "
        r"data\.validation_fraction=0\.1 says .* mean \d+ or data\.validation_fraction=0\.2",
    ):
        load_data(config, 1000, 1, tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match="the training split has only"):
        load_data(config, 100_000, 1, tokenizer=TOKENIZER)


# The default corpus


def test_stdlib_files():
    files = stdlib_files()
    assert files == sorted(files) and len(files) > 500
    assert any(file.endswith(f"{os.sep}dataclasses.py") for file in files)
    assert not any(
        part in file.split(os.sep)
        for file in files
        for part in ("site-packages", "dist-packages", "__pycache__")
    )


@pytest.mark.full
def test_stdlib_corpus(tmp_path: Path):
    """The whole of it: prepared once, then only mapped, and counting predicts it this well."""
    config = DataConfig(cache_dir=str(tmp_path))
    prepare(config, TOKENIZER)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.arrow")}
    train, validation = load_data(config, 256, 1, tokenizer=TOKENIZER)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.arrow")} == written != {}
    assert 5e6 < train.sequences.num_tokens < 1e8 and validation.sequences.per_epoch > 1000
    counted, held = train.sequences.tokens(2_000_000), validation.sequences.tokens(300_000)
    bigram, trigram = ngram_loss(counted, held, 2), ngram_loss(counted, held, 3)
    assert 2.2 < bigram < 2.8 and 1.6 < trigram < bigram - 0.3


def test_a_hub_out_of_reach_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The library would try six times, half a minute, and say so every time."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    error = load_error(source=Source.hub, name="someone/something", cache_dir=str(tmp_path))
    assert "is not in the cache, and http://127.0.0.1:9 cannot be reached" in str(error)
    assert sum(slept) < 5
