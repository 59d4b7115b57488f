from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from app.data.feed import Batch, Cursor, DataSplit, TrainFeed, ValidationFeed, make_batch
from app.data.packing import Documents, PackedSequences

EOD = 9


def split_of(lengths: list[int], seq_len: int, boundary: int | None = None) -> DataSplit:
    generator = np.random.default_rng(5)
    documents = Documents.from_lists([[*generator.integers(0, EOD, n), EOD] for n in lengths])
    return DataSplit(
        PackedSequences(documents.lengths_D, documents.read, seq_len, seed=0), boundary
    )


def rows(batches: list[Batch]) -> list[list[int]]:
    return [
        row
        for batch in batches
        for row in torch.cat([batch.tokens_BS, batch.labels_BS], dim=1).tolist()
    ]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_global_sequences_do_not_depend_on_dp(dp: int):
    """8 sequences a step as microbatches of 2; 20 steps run through several epochs."""
    feeds = [
        TrainFeed(
            split_of([7, 12, 30, 3, 9, 25] * 4, 6),
            rank,
            dp,
            micro_batch=2,
            num_microbatches=4 // dp,
            cursor=Cursor(),
        )
        for rank in range(dp)
    ]
    reference = split_of([7, 12, 30, 3, 9, 25] * 4, 6).sequences
    for step in range(20):
        steps = [feed.next_step() for feed in feeds]
        # microbatch m of rank r comes m·dp + r-th
        ordered = [steps[r][m] for m in range(4 // dp) for r in range(dp)]
        wanted = [reference.sample(step * 8 + i) for i in range(8)]
        assert rows(ordered) == [[*row[:-1], *row[1:]] for row in wanted]
    assert {feed.cursor.sequences for feed in feeds} == {160}


@pytest.mark.parametrize("done", [0, 1, 7, 19])
def test_resume_continues_with_the_same_tokens_at_another_dp(done: int):
    data = split_of([7, 12, 30, 3, 9, 25] * 4, 6)
    whole = TrainFeed(data, 0, 1, micro_batch=2, num_microbatches=4, cursor=Cursor())
    for _ in range(done):
        whole.next_step()
    cursor = Cursor.from_state(json.loads(json.dumps(whole.cursor.state())))
    assert cursor == whole.cursor == Cursor(sequences=8 * done)
    resumed = [
        TrainFeed(
            split_of([7, 12, 30, 3, 9, 25] * 4, 6),
            rank,
            2,
            micro_batch=2,
            num_microbatches=2,
            cursor=cursor,
        )
        for rank in range(2)
    ]
    for _ in range(20):
        parts = [feed.next_step() for feed in resumed]
        assert rows(whole.next_step()) == rows([parts[r][m] for m in range(2) for r in range(2)])


def test_cursor_survives_torch_load_with_weights_only():
    cursor = Cursor(12, {"dp": 2, "place": {"epoch": 0, "source": None}, "leftover": [1, 2]})
    file = io.BytesIO()
    torch.save(cursor.state(), file)
    file.seek(0)
    assert Cursor.from_state(torch.load(file, weights_only=True)) == cursor


def test_labels_are_the_next_tokens():
    batch = make_batch([np.arange(5), np.arange(10, 15)], None)
    assert batch.tokens_BS.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert batch.labels_BS.tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.ends_BD is None
    assert {t.dtype for t in (batch.tokens_BS, batch.labels_BS, batch.positions_BS)} == {
        torch.int64
    }
    assert batch.labels_BS.is_contiguous() and batch.tokens_BS.is_contiguous()


def test_documents_kept_apart():
    row = np.array([4, 5, EOD, 6, EOD, EOD, 7, 8, 3])
    batch = make_batch([row], boundary=EOD)
    assert batch.tokens_BS.tolist() == [[4, 5, EOD, 6, EOD, EOD, 7, 8]]
    assert batch.labels_BS.tolist() == [[5, EOD, -100, EOD, -100, -100, 8, 3]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert batch.ends_BD.tolist() == [[3, 5, 6, 8]] and batch.ends_BD.dtype == torch.int32


def test_documents_kept_apart_against_a_loop():
    data = split_of([1, 2, 3, 5, 8, 13, 21], 16, boundary=EOD)
    for batch in TrainFeed(
        data, 0, 1, micro_batch=3, num_microbatches=5, cursor=Cursor()
    ).next_step():
        for b in range(3):
            position, ends = 0, []
            for s in range(16):
                token, label = int(batch.tokens_BS[b, s]), int(batch.labels_BS[b, s])
                assert int(batch.positions_BS[b, s]) == position
                assert label == (
                    -100 if token == EOD else int(batch.tokens_BS[b, s + 1]) if s < 15 else label
                )
                position = 0 if token == EOD else position + 1
                ends += [s + 1] if token == EOD or s == 15 else []
            found = batch.ends_BD[b].tolist()
            assert found[: len(ends)] == ends and set(found[len(ends) :]) <= {16}


@pytest.mark.parametrize(
    ("lengths", "dp", "wanted"),
    [([50] * 20, 1, 4), ([50] * 20, 2, 4), ([50] * 6, 2, 3), ([50], 2, 1), ([11], 4, 1)],
)
def test_validation_has_as_many_microbatches_on_every_rank(
    lengths: list[int], dp: int, wanted: int
):
    feeds = [
        ValidationFeed(split_of(lengths, 10), rank, dp, micro_batch=4, eval_batches=4)
        for rank in range(dp)
    ]
    passes = [[list(feed) for feed in feeds] for _ in range(2)]
    assert all(
        len(feed) == len(batches) == wanted for feed, batches in zip(feeds, passes[0], strict=True)
    )
    assert [rows(batches) for batches in passes[0]] == [rows(batches) for batches in passes[1]]
    reference = split_of(lengths, 10).sequences
    seen = rows([passes[0][r][m] for m in range(wanted) for r in range(dp)])
    assert seen == [[*row[:-1], *row[1:]] for row in map(reference.sample, range(wanted * dp * 4))]


@pytest.mark.full
def test_only_the_corpus_imports_datasets():
    code = (
        "import app.data.load, app.data.feed, app.data.stream, app.data.packing, "
        "app.data.baseline, app.data.tokenizer, sys;"
        "assert 'datasets' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, cwd=Path(__file__).parents[2]
    )
