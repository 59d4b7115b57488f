"""Blends of sources: shares, order, positions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import DataConfig
from app.data.blend import BlendedSequences, BlendPart
from app.data.corpora import Corpora, load_all, prepare_all
from app.data.feed import Cursor, DataSplit, TrainFeed
from app.data.packing import PADDING, Documents, PackedSequences
from app.data.tokenizer import load_tokenizer
from app.engine.report.opening import _padding
from app.errors import ConfigError
from tests.data.conftest import write_jsonl

SEQ = 4
PLACE = 1000  # tokens of a source are its number times this, and more


def part(number: int, weight: float = 1.0, sequences: int = 12, **choices: Any) -> BlendPart:
    """A source of one document, whose k-th sequence in its order is known by its tokens."""
    tokens = number * PLACE + np.arange(sequences * SEQ + 1)
    documents = Documents.from_lists([tokens])
    packed = PackedSequences(documents.lengths_D, documents.read, SEQ, seed=number)
    return BlendPart(f"s{number}", weight, choices.get("repeats", True), packed)


def drawn(blend: BlendedSequences, count: int) -> list[int]:
    """Sources of the first sequences."""
    reader = blend.reader(1, 1, 0, None)
    return [int(reader.sample(index)[0]) // PLACE for index in range(count)]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_shares_are_within_one_sequence(weights: list[float]):
    blend = BlendedSequences(tuple(part(n, weight) for n, weight in enumerate(weights)))
    chosen = np.array(drawn(blend, 200))[:, None] == np.arange(len(weights))
    counts = np.vstack([np.zeros(len(weights)), chosen.cumsum(axis=0)])
    shares = np.arange(201)[:, None] * np.array(weights) / sum(weights)
    off = counts - shares
    assert np.abs(off).max() < 1
    if len(weights) == 2:  # in any window too
        assert np.ptp(off, axis=0).max() <= 1 + 1e-6


def test_sources_keep_their_own_order():
    alone = part(1).sequences
    blend = BlendedSequences((part(0, 2.0), part(1)))
    reader = blend.reader(1, 1, 0, None)
    rows = [reader.sample(index) for index in range(60)]
    of_one = [row for row in rows if row[0] // PLACE == 1]
    assert len(of_one) == 20
    assert all(np.array_equal(row, alone.sample(n)) for n, row in enumerate(of_one))


def test_source_that_stops_is_read_once():
    blend = BlendedSequences((part(0, 3.0, repeats=False), part(1), part(2)))
    counts = Counter(drawn(blend, 100))
    assert counts[0] == 12 and abs(counts[1] - counts[2]) <= 1
    assert blend.limit is None
    ends = BlendedSequences((part(0, repeats=False), part(1, sequences=5, repeats=False)))
    assert ends.limit == 17 and Counter(drawn(ends, 17)) == {0: 12, 1: 5}
    with pytest.raises(ConfigError, match="all stop when they are used up"):
        drawn(ends, 18)


def test_padding_does_not_count_for_shares():
    """Of documents of one token, half of every sequence of two documents is padding."""
    single = Documents.from_lists([[PLACE + n] for n in range(100)])
    padded = PackedSequences(single.lengths_D, single.read, SEQ, seed=0, max_documents=2)
    assert padded.padding == pytest.approx(0.5, abs=0.02)
    blend = BlendedSequences((part(0), BlendPart("s1", 1.0, True, padded)))
    reader = blend.reader(1, 1, 0, None)
    rows = [reader.sample(index) for index in range(90)]
    tokens = Counter(int(row[0]) // PLACE for row in rows for _ in row[row != PADDING][:SEQ])
    assert tokens[1] == pytest.approx(tokens[0], rel=0.05)
    totals = blend.reader(1, 1, 0, None).totals(90)["tokens"]
    assert totals["s1"] == pytest.approx(totals["s0"], rel=0.05)


def test_padding_of_a_blend_and_what_leaves_less():
    """A source of which half is padding takes two of three positions."""
    single = Documents.from_lists([[PLACE + n] for n in range(101)])
    padded = PackedSequences(single.lengths_D, single.read, SEQ, seed=0, max_documents=2)
    blend = BlendedSequences((part(0), BlendPart("s1", 1.0, True, padded)))
    assert blend.padding == pytest.approx(1 / 3, abs=0.01)
    assert blend.padding_with(3) == pytest.approx(1 / 7, abs=0.01)
    line = _padding(DataSplit(blend, PLACE, max_documents=2))
    assert line is not None and line.endswith(
        "where more would fit; data.max_documents=4 leaves 0.0%"
    )


def test_too_small_a_source_is_named(tmp_path: Path):
    for name, size in (("large", 1000), ("small", 9)):
        write_jsonl(tmp_path / f"{name}.jsonl", ["x" * size, "y" * size])
    paths = [{"path": f"{tmp_path}/{name}.jsonl"} for name in ("large", "small")]
    config = DataConfig(sources=paths, cache_dir=f"{tmp_path}/cache")
    tokenizer = load_tokenizer("bytes")
    folders = prepare_all(config, tokenizer, Corpora.find(config))
    with pytest.raises(ConfigError) as error:
        load_all(config, 16, 1, tokenizer=tokenizer, folders=folders)
    assert str(error.value) == (
        "data.sources=small: the training split of small has only 10 tokens, one sequence "
        "needs 17; leave it out, give it more documents, or lower train.seq_len"
    )


def feed(blend: BlendedSequences, dp: int = 1, rank: int = 0, cursor: Cursor | None = None):
    return TrainFeed(
        DataSplit(blend, None),
        rank,
        dp,
        micro_batch=2,
        num_microbatches=4 // dp,
        cursor=cursor or Cursor(),
    )


def step(feeds: list[TrainFeed]) -> list[list[int]]:
    """Rows of a step in global order."""
    steps = [each.next_step() for each in feeds]
    batches = [batches[m] for m in range(len(steps[0])) for batches in steps]
    return [row for batch in batches for row in batch.tokens_BS.tolist()]


@pytest.mark.parametrize("done", [0, 1, 3])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_resume_gives_the_same_sequences(done: int, dp: int):
    """Read ahead or not, at another number of ranks, through the end of a source."""
    blend = BlendedSequences((part(0, 2.0), part(1, repeats=False), part(2, 0.5)))
    whole = feed(blend)
    for _ in range(done):
        whole.next_step()
    whole.look_ahead()
    cursor = Cursor.from_state(json.loads(json.dumps(whole.cursor.state())))
    others = [feed(blend, dp, rank, cursor) for rank in range(dp)]
    for _ in range(6):
        assert step(others) == step([whole])
        assert whole.by_source() == others[-1].by_source()
    assert others[0].cursor == whole.cursor


def test_sources_come_and_go_at_their_positions():
    before = feed(BlendedSequences((part(0), part(1))))
    for _ in range(2):
        before.next_step()
    seen = Counter(row[0] // PLACE for row in step([before]))
    assert seen == {0: 4, 1: 4}
    after = BlendedSequences((part(1, 3.0), part(2)))
    found = step([feed(after, cursor=before.cursor)])
    assert Counter(row[0] // PLACE for row in found) == {1: 6, 2: 2}
    # where it was: 12 sequences of s1 were used
    wanted = [part(1).sequences.sample(n)[:-1].tolist() for n in range(12, 18)]
    assert [row for row in found if row[0] // PLACE == 1] == wanted


def test_position_of_one_source_is_refused():
    blend = BlendedSequences((part(0), part(1)))
    with pytest.raises(ConfigError, match="not that of several sources"):
        blend.reader(1, 1, 8, None)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"path": "a.txt", "weight": 0}], "weight of a source is a number above 0"),
        ([{"path": "a.txt", "weight": "much"}], "weight of a source is a number above 0"),
        ([{"path": "a.txt"}, {"path": "b/a.txt"}], "names 2 sources a; give each a label"),
        ([{"pth": "a.txt"}], "a source has no key pth.*did you mean path"),
        ([{"path": "a.txt", "after_end": "halt"}], "after_end of a source is one of repeat, stop"),
        ([{"path": "a.txt", "label": "a/b"}], "is a label, which has no /"),
        ([{"path": "a.txt", "streaming": True}], "data.sources=a: data.streaming=true"),
        (3, "must be a list of sources; give for example"),
        ([3], "is no source"),
    ],
)
def test_mistakes_in_lists_of_sources(entries: Any, said: str):
    for key in ("sources", "validation"):
        if key == "validation" and "streaming" in said:
            continue
        with pytest.raises(ConfigError, match=said):
            DataConfig(**{key: entries})


def test_entries_take_kinds_and_names_from_paths():
    config = DataConfig(sources=["x/web.jsonl.gz", {"path": ["c/*.txt"], "weight": 2}, {}])
    kinds = [(entry.label, alone.source.value) for entry, alone in config.parts]
    assert kinds == [("web", "jsonl"), ("c", "text"), ("stdlib", "stdlib")]
    with pytest.raises(ConfigError, match=r"data\.path=\[a\.txt\]: is read without data\.sources"):
        DataConfig(source="text", path="a.txt", sources=config.sources)  # type: ignore[arg-type]
