"""Packing of whole documents, beside a packing piece by piece."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.choices import Packing, Source
from app.config import DataConfig
from app.data.best_fit import BestFitSequences, apart, best_fit
from app.data.feed import IGNORED, Cursor, DataSplit, TrainFeed, make_batch
from app.data.load import load_data
from app.data.packing import PADDING, Documents, PackedSequences
from app.data.tokenizer import ByteTokenizer
from app.engine.report.opening import _padding
from app.errors import ConfigError
from tests.data.conftest import write_jsonl

EOD = 0
at_leisure = settings(deadline=None)  # other programs may have the processor


def numbered(lengths: list[int]) -> Documents:
    """Documents whose tokens are all different, but for their ends."""
    starts = np.cumsum([1, *lengths])
    return Documents.from_lists([[*range(a, b - 1), EOD] for a, b in pairwise(starts)])


def packed(lengths: list[int], seq_len: int, most: int = 4, seed: int = 1) -> BestFitSequences:
    found = numbered(lengths)
    return BestFitSequences(found.lengths_D, found.read, seq_len, seed=seed, max_documents=most)


def one_by_one(lengths: list[int], capacity: int, most: int) -> list[int]:
    """Best-fit decreasing as it is defined."""
    bins: list[int] = [0] * len(lengths)
    open_bins: list[tuple[int, int, int, int]] = []  # room, when it became so, number, pieces
    count = 0
    longest_first = sorted(range(len(lengths)), key=lambda each: -lengths[each])
    for clock, piece in enumerate(longest_first):
        fitting = [each for each in open_bins if each[0] >= lengths[piece]]
        if fitting:
            chosen = min(fitting)
            open_bins.remove(chosen)
        else:
            chosen = (capacity, 0, count, 0)
            count += 1
        bins[piece] = chosen[2]
        if chosen[3] + 1 < most:
            open_bins.append((chosen[0] - lengths[piece], clock, chosen[2], chosen[3] + 1))
    return bins


@at_leisure
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 6))
def test_bins_equal_those_of_piece_by_piece(lengths: list[int], most: int):
    found = best_fit(np.array(lengths, np.int64), 20, most)
    assert found.tolist() == one_by_one(lengths, 20, most)


@at_leisure
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(2, 15),
    st.integers(1, 5),
    st.integers(0, 2),
)
def test_every_token_of_a_document_is_predicted_once(
    lengths: list[int], seq_len: int, most: int, epoch: int
):
    if max(lengths) < 2:
        lengths.append(2)
    sequences = packed(lengths, seq_len, most)
    first = sum(len(sequences._order(n, 0).sequences_K) for n in range(epoch))
    rows = [sequences.sample(first + k) for k in range(len(sequences._order(epoch, 0).sequences_K))]
    predicted: Counter[int] = Counter()
    for row in rows:
        batch = make_batch([row], EOD, most)
        labels = batch.labels_BS[0].numpy()
        assert batch.ends_BD is not None and batch.ends_BD.shape == (1, most)
        predicted.update(labels[labels != IGNORED].tolist())
        ended = [int(ids[-1]) == EOD for ids in np.split(row, np.flatnonzero(row == EOD) + 1)[:-1]]
        assert all(ended)
    wanted: Counter[int] = Counter()
    for start, length in zip(np.cumsum([1, *lengths]).tolist(), lengths, strict=False):
        wanted.update([*range(start + 1, start + length - 1), *([EOD] if length > 1 else [])])
    assert predicted == wanted


def test_documents_that_fit_are_whole():
    draw = np.random.default_rng(1)
    lengths = draw.integers(2, 60, 200).tolist()
    sequences = packed(lengths, 64, most=16)
    whole = {tuple(range(a, b - 1)) for a, b in pairwise(np.cumsum([1, *lengths]).tolist())}
    found = []
    for index in range(sequences.per_epoch):
        row = sequences.sample(index)
        tokens = row[row != PADDING]
        parts = np.split(tokens, np.flatnonzero(tokens == EOD) + 1)
        assert not len(parts[-1])
        found += [tuple(part[:-1].tolist()) for part in parts[:-1]]
    assert set(found) == whole and len(found) == len(lengths)


def test_padding_is_that_of_the_sequences():
    sequences = packed(np.random.default_rng(1).integers(2, 60, 300).tolist(), 32, most=8)
    rows = [sequences.sample(index)[:-1] for index in range(sequences.per_epoch)]
    share = np.mean(np.stack(rows) == PADDING)
    assert 0 < share < 0.1 and sequences.padding == pytest.approx(share)


def test_epochs_and_seeds_differ_and_repeat():
    lengths = np.random.default_rng(2).integers(2, 20, 100).tolist()
    sequences, again, other = packed(lengths, 32), packed(lengths, 32), packed(lengths, 32, seed=2)
    count = sequences.per_epoch

    def rows(of: PackedSequences, first: int) -> list[list[int]]:
        return [of.sample(first + k).tolist() for k in range(count)]

    first, second = rows(sequences, 0), rows(sequences, count)
    assert first != second and rows(other, 0) != first
    assert rows(again, count) == second and rows(again, 0) == first  # in any order


def test_resumed_feeds_continue_exactly():
    lengths = np.random.default_rng(3).integers(2, 50, 90).tolist()
    split = DataSplit(packed(lengths, 32, most=4), EOD, 4)
    feed = TrainFeed(split, 0, 1, micro_batch=2, num_microbatches=2, cursor=Cursor())
    for _ in range(40):  # beyond the first epoch
        feed.next_step()
    cursor = Cursor.from_state(feed.cursor.state())
    whole = feed.next_step()
    for rank in range(2):  # at another number of ranks
        fresh = DataSplit(packed(lengths, 32, most=4), EOD, 4)
        (batch,) = TrainFeed(
            fresh, rank, 2, micro_batch=2, num_microbatches=1, cursor=cursor
        ).next_step()
        assert batch.tokens_BS.equal(whole[rank].tokens_BS)
        assert batch.labels_BS.equal(whole[rank].labels_BS)


def test_texts_of_several_documents_are_cut_at_ends():
    texts = Documents.from_lists([[1, 2, EOD, 3, EOD], [4, EOD], [5, EOD, 6, 7, EOD]])
    found = apart(texts, EOD)
    parts = [found.read(n, 0, int(size)).tolist() for n, size in enumerate(found.lengths_D)]
    assert parts == [[1, 2, EOD], [3, EOD], [4, EOD], [5, EOD], [6, 7, EOD]]
    train, held = Documents.from_lists([[1, 2, EOD, 3, EOD, 4, 5, 6, EOD]]).split(0.3)
    assert apart(train, EOD).lengths_D.tolist() == [3, 2]  # without the one that was cut
    assert held.read(0, 0, 3).tolist() == [5, 6, EOD]


def config(folder: Path, **options: object) -> DataConfig:
    write_jsonl(folder / "d.jsonl", ["word " * (1 + n * 7 % 11) for n in range(400)])
    packing = {"document_mask": True, "packing": Packing.best_fit, **options}
    path = (f"{folder}/d.jsonl",)
    return DataConfig(source=Source.jsonl, path=path, cache_dir=f"{folder}/cache", **packing)


def test_fewer_documents_are_cut_and_padding_is_said(tmp_path: Path):
    train, validation = load_data(config(tmp_path), 64, 1, tokenizer=ByteTokenizer())
    assert isinstance(train.sequences, BestFitSequences)
    assert isinstance(validation.sequences, BestFitSequences)
    assert 0.001 < train.sequences.padding < 0.1
    said = _padding(train)
    assert said == (
        f"{train.sequences.padding:.1%} of positions are padding, as data.packing=best_fit cuts no "
        "document that fits"
    )


@pytest.mark.parametrize("packing", list(Packing))
def test_max_documents_is_advised(packing: Packing, tmp_path: Path):
    options = {"packing": packing, "max_documents": 2}
    train, _ = load_data(config(tmp_path, **options), 256, 1, tokenizer=ByteTokenizer())
    said = _padding(train)
    assert said is not None and "; data.max_documents=" in said
    most = int(said.rsplit("=", 1)[1].split()[0])
    better, _ = load_data(
        config(tmp_path, packing=packing, max_documents=most), 256, 1, tokenizer=ByteTokenizer()
    )
    assert isinstance(better.sequences, PackedSequences)
    assert said.endswith(f"leaves {better.sequences.padding:.1%}")
    assert (again := _padding(better)) is None or "max_documents=" not in again.split(";")[-1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"document_mask": False}, r"data.packing=best_fit: pads sequences, which needs data.doc"),
        ({"source": Source.hub, "name": "x", "path": (), "streaming": True}, "a stream does not"),
    ],
)
def test_packing_without_its_needs_is_refused(options: dict, told: str):
    given = {"source": Source.text, "path": ("x",), "document_mask": True, **options}
    with pytest.raises(ConfigError, match=told):
        DataConfig(packing=Packing.best_fit, **given)
