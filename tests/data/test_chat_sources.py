"""Conversations of arrays, datasets and streams, and beside text: the tokens of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from app.choices import Packing, Source
from app.config import DataConfig
from app.data import stream
from app.data.corpora import load_all
from app.data.feed import IGNORED, Cursor, DataSplit, TrainFeed
from app.data.load import load_data, prepare
from app.data.marks import ids_of_marked, trained
from app.data.prepared import map_tokens
from app.data.sources import find_sources
from app.data.tokenizer import load_tokenizer
from app.errors import ConfigError
from tests.cases import chosen
from tests.data.conftest import write_jsonl

BYTES = load_tokenizer("bytes")
WHOLE = {"document_mask": True, "packing": Packing.best_fit}


def row_of(number: int) -> dict[str, Any]:
    said = f"{number:02d} 2024-03-01T08:30:00Z " + "é" * (number * 5 % 17)
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]}


ROWS = [row_of(number) for number in range(30)]


def lines(rows: Sequence[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def put(folder: Path, kind: str, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    """Write rows in two files of a kind."""
    folder.mkdir(exist_ok=True)
    for number, some in enumerate((rows[:12], rows[12:])):
        path = folder / f"part{number}.{'json' if kind == 'array' else kind}"
        if kind == "parquet":
            table = pa.Table.from_pylist([{**row, "id": 1} for row in some])
            parquet.write_table(table, path)
        else:
            path.write_text(lines(some) if kind == "jsonl" else json.dumps(some, indent=1))
    return folder


def config_of(folder: Path, **named: Any) -> DataConfig:
    return DataConfig(source=Source.chat, chat_template="chatml",
                      cache_dir=str(folder.parent / "cache"), **named)  # fmt: skip


def tokens_of(config: DataConfig) -> list[list[int]]:
    folder = prepare(config, BYTES)
    assert folder
    found = map_tokens(folder)
    return [found.read(d, 0, int(found.lengths_D[d])).tolist() for d in range(len(found))]


@pytest.fixture
def wanted(tmp_path: Path) -> list[list[int]]:
    folder = put(tmp_path / "wanted", "jsonl")
    found = tokens_of(config_of(folder, path=f"{folder}/*"))
    assert len(found) == len(ROWS)
    return found


@pytest.mark.parametrize("kind", ["array", "parquet"])
def test_files_hold_the_conversations_of_lines(kind: str, wanted, tmp_path: Path):
    folder = put(tmp_path / "d", kind)
    assert tokens_of(config_of(folder, path=f"{folder}/*")) == wanted


@pytest.mark.parametrize("kind", ["jsonl", "array", "parquet"])
def test_datasets_hold_the_conversations_of_lines(kind: str, wanted, tmp_path: Path):
    config = config_of(put(tmp_path / "d", kind), name=str(tmp_path / "d"))
    assert tokens_of(config) == wanted
    assert find_sources(config).record()["count"] == 2


def test_rows_of_arrays_are_named(tmp_path: Path):
    rows = [*ROWS[:3], {"messages": []}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=r"a.json: row 4 has no turn of the assistant"):
        tokens_of(config_of(tmp_path / "d", path=str(tmp_path / "a.json")))
    (tmp_path / "a.json").write_text("[" + json.dumps(ROWS[0]) + ",\n{]")
    with pytest.raises(ConfigError, match=r"a.json: line .* is not JSON: .* at line 2"):
        tokens_of(config_of(tmp_path / "d", path=str(tmp_path / "a.json")))


BAD = {"messages": [{"role": "user", "content": "who?"}]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_bad_rows_of_datasets_are_named(kind: str, tmp_path: Path):
    folder = put(tmp_path / "d", kind, [*ROWS[:14], BAD])
    config = config_of(folder, name=str(folder))
    with pytest.raises(ConfigError, match=r"data.name=.*row 15 has no turn of the assistant"):
        tokens_of(config)
    streamed = config_of(folder, name=str(folder), streaming=True, validation_documents=2)
    train, _ = load_data(streamed, 64, 0, BYTES)
    reader = train.sequences.reader(1, 1, 0, None)
    with pytest.raises(
        ConfigError, match=r"a row has no turn of the assistant.*begins.*who"
    ) as end:
        for index in range(40):
            reader.sample(index)
    assert "\n" not in str(end.value)


def test_datasets_without_conversations_are_refused(tmp_path: Path):
    parquet.write_table(pa.table({"text": ["a"], "other": ["b"]}), tmp_path / "a.parquet")
    config = config_of(tmp_path / "d", name=str(tmp_path))
    with pytest.raises(ConfigError, match=r"data.name=.*is no conversation.*has 'text', 'other'"):
        tokens_of(config)


@pytest.mark.parametrize(("dp_rank", "dp"), chosen([(0, 1), (1, 2)], [(1, 2)]))
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_streamed_conversations_resume_at_any_point(
    kind: str, dp_rank: int, dp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream, "SHUFFLE_BLOCK", 4)
    folder = put(tmp_path / "d", kind)
    config = config_of(folder, name=str(folder), streaming=True, validation_documents=3,
                       document_mask=True, max_documents=2)  # fmt: skip
    train, _ = load_data(config, 48, 1, BYTES)

    def feed(cursor: Cursor) -> TrainFeed:
        return TrainFeed(train, dp_rank, dp, micro_batch=2, num_microbatches=1, cursor=cursor)

    def step(one: TrainFeed) -> list[Any]:
        (batch,) = one.next_step()
        return [batch.tokens_BS.tolist(), batch.labels_BS.tolist(), batch.positions_BS.tolist()]

    whole, states, steps = feed(Cursor()), [], []
    for _ in range(24):
        states.append(json.dumps(whole.cursor.state()))
        steps.append(step(whole))
    for number in (1, 5, 11, 17):
        resumed = feed(Cursor.from_state(json.loads(states[number])))
        assert [step(resumed) for _ in range(3)] == steps[number : number + 3]


def test_streams_train_what_files_do(wanted: list[list[int]], tmp_path: Path):
    folder = put(tmp_path / "d", "jsonl")
    config = config_of(folder, name=str(folder), streaming=True, validation_documents=3)
    train, held = load_data(config, 40, 1, BYTES)
    reader = train.sequences.reader(1, 1, 0, None)
    flat = np.concatenate([reader.sample(index)[:-1] for index in range(200)])
    borders = np.flatnonzero([token in {each[-1] for each in wanted} for token in flat]) + 1
    documents = [each.tolist() for each in np.split(flat, borders)[:-1]]
    first = documents[: len(ROWS) - 3]
    assert sorted(first) == sorted(wanted[3:])
    assert held.sequences.tokens(10**6).tolist() and held.marked


def test_blends_with_text_keep_both_losses_and_resume(tmp_path: Path):
    folder = put(tmp_path / "d", "jsonl")
    write_jsonl(tmp_path / "text.jsonl", [f"{n:02d} plain text" * 3 for n in range(30)])
    config = DataConfig(
        source=Source.chat,
        sources=[
            {"path": f"{folder}/*.jsonl", "label": "talk"},
            {"path": str(tmp_path / "text.jsonl"), "source": "jsonl", "label": "text"},
        ],
        chat_template="chatml", cache_dir=str(tmp_path / "cache"), **WHOLE,
    )  # fmt: skip
    train, held = load_all(config, 128, 0, BYTES, {})
    assert train.marked and [each.label for each in held] == ["talk", "text"]
    assert [each.split.marked for each in held] == [True, False]
    for steps in (1, 4):
        feed = feed_of(train, Cursor())
        for _ in range(steps):
            feed.next_step()
        saved = Cursor.from_state(json.loads(json.dumps(feed.cursor.state())))
        (one,), (other,) = feed.next_step(), feed_of(train, saved).next_step()
        assert one.tokens_BS.equal(other.tokens_BS) and one.labels_BS.equal(other.labels_BS)
    said, plain = losses_of(train)
    assert said and all(text.endswith("<|im_end|>") for text in said)
    assert plain and all("plain text" in text and "<|" not in text for text in plain)


def feed_of(train: DataSplit, cursor: Cursor) -> TrainFeed:
    return TrainFeed(train, 0, 1, micro_batch=1, num_microbatches=1, cursor=cursor)


def losses_of(train: DataSplit) -> tuple[list[str], list[str]]:
    """What has a loss in each document of a blend's sequences, of either source."""
    feed = feed_of(train, Cursor())
    found: tuple[list[str], list[str]] = ([], [])
    for _ in range(12):
        (batch,) = feed.next_step()
        assert batch.sources_B is not None
        labels, starts = batch.labels_BS[0], torch.where(batch.positions_BS[0] == 0)[0].tolist()
        for begin, end in zip(starts, [*starts[1:], len(labels)], strict=True):
            ids = [int(label) for label in labels[begin:end] if label not in (IGNORED, BYTES.eod)]
            if ids:
                found[int(batch.sources_B[0])].append(bytes(ids).decode(errors="replace"))
    return found


def test_validation_of_conversations_has_losses_on_answers(tmp_path: Path):
    folder = put(tmp_path / "d", "jsonl")
    (tmp_path / "held.jsonl").write_text(lines(ROWS[:4]))
    config = config_of(folder, path=f"{folder}/*", validation=str(tmp_path / "held.jsonl"), **WHOLE)
    _, (held,) = load_all(config, 128, 0, BYTES, {})
    assert held.split.marked
    sequences = held.split.sequences
    rows = [sequences.sample(index) for index in range(sequences.per_epoch)]
    said = "".join(bytes(ids_of_marked(row[trained(row)]).tolist()).decode() for row in rows)
    answers = [row["messages"][1]["content"] + "<|im_end|>" for row in ROWS[:4]]
    assert sorted(said.split("<|im_end|>")) == sorted(["", *[each[:-10] for each in answers]])


def test_names_and_paths_are_not_both_read():
    with pytest.raises(ConfigError, match=r"data.path=.*is not read.*data.name=null"):
        DataConfig(source=Source.chat, path="a.jsonl", name="b")
    with pytest.raises(ConfigError, match="data=chat is prepared, not streamed"):
        DataConfig(source=Source.chat, path="a.jsonl", streaming=True)
