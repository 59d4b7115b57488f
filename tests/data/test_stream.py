from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from app.choices import Source
from app.config import DataConfig
from app.data import stream
from app.data.blend import BlendedSequences, BlendPart
from app.data.feed import Cursor, DataSplit, TrainFeed
from app.data.load import load_data
from app.data.packing import PackedSequences
from app.data.tokenizer import load_tokenizer
from app.errors import ConfigError
from tests.cases import chosen

TOKENIZER = load_tokenizer("bytes")
SHARDS = [
    [f"{shard}.{i:02d}" + "x" * (i * 5 % 17) for i in range(count)]
    for shard, count in enumerate((3, 20, 16, 9))
]
DOCUMENTS = [text for shard in SHARDS for text in shard]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "SHUFFLE_BLOCK", 4)


def feed(
    config: DataConfig, dp_rank: int = 0, dp: int = 1, cursor: Cursor | None = None
) -> TrainFeed:
    """Loads the data anew, as every rank of a run does."""
    train, _ = load_data(config, 11, 1, tokenizer=TOKENIZER)
    return TrainFeed(
        train, dp_rank, dp, micro_batch=2, num_microbatches=1, cursor=cursor or Cursor()
    )


def tokens(one: TrainFeed, steps: int) -> list[list[list[int]]]:
    return [
        torch.cat([batch.tokens_BS, batch.labels_BS], dim=1).tolist()
        for _ in range(steps)
        for batch in one.next_step()
    ]


def epoch_of(config: DataConfig, dp_rank: int, dp: int, epoch: int = 0, seed: int = 1) -> list[str]:
    """The documents that a rank reads in one epoch."""
    train, _ = load_data(config, 11, seed, tokenizer=TOKENIZER)
    texts = train.sequences._lane(dp_rank, dp, None).texts
    read = []
    while texts.place.epoch <= epoch:
        text = next(texts)
        read.append((texts.place.epoch, text))
    return [text for number, text in read if number == epoch]


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_ranks_share_the_documents_without_the_held_out(
    stream_config: Callable[..., DataConfig], dp: int
):
    """4 shards, the first shorter than what is held out: whole shards for dp 1 and 2, every
    third document for dp 3.
    """
    config = stream_config(SHARDS)
    _, validation = load_data(config, 11, 1, tokenizer=TOKENIZER)
    held_out = TOKENIZER.decode(validation.sequences.tokens(1000))
    assert sorted(held_out) == sorted("".join(DOCUMENTS[:5]))
    parts = [epoch_of(config, rank, dp) for rank in range(dp)]
    union = [text for part in parts for text in part]
    assert len(union) == len(set(union)) and not set(union) & set(DOCUMENTS[:5])
    # every rank skips as many documents as are held out, so with several ranks a few are not read
    # at all
    assert len(DOCUMENTS) - 5 * dp <= len(union) <= len(DOCUMENTS) - 5
    assert dp > 1 or sorted(union) == sorted(DOCUMENTS[5:])


def test_epochs_and_seeds_shuffle_differently(stream_config: Callable[..., DataConfig]):
    config = stream_config(SHARDS)
    first, second = epoch_of(config, 0, 1, epoch=0), epoch_of(config, 0, 1, epoch=1)
    assert first != second and sorted(first) == sorted(second)
    assert first != epoch_of(config, 0, 1, seed=2) and first == epoch_of(config, 0, 1)
    blocks = [(set(first[i : i + 4]), set(DOCUMENTS[5 + i : 9 + i])) for i in range(0, 40, 4)]
    assert first != DOCUMENTS[5:] and all(read == stored for read, stored in blocks)


def test_packed_sequences_are_the_documents_end_to_end(stream_config: Callable[..., DataConfig]):
    config = stream_config(SHARDS)
    texts = epoch_of(config, 0, 1) + epoch_of(config, 0, 1, epoch=1)
    flat = [i for text in texts for i in (*text.encode(), TOKENIZER.eod)]
    rows = [row for batch in tokens(feed(config), 40) for row in batch]
    assert rows == [flat[k * 11 : k * 11 + 11] + flat[k * 11 + 1 : k * 11 + 12] for k in range(80)]


@pytest.mark.parametrize(("dp_rank", "dp"), chosen([(0, 1), (1, 2), (2, 3), (3, 4)], [(2, 3)]))
def test_resume_at_any_point_gives_the_same_tokens(
    stream_config: Callable[..., DataConfig], dp_rank: int, dp: int
):
    """Every point of more than two epochs, through JSON."""
    config = stream_config(SHARDS)
    whole, steps = feed(config, dp_rank, dp), 70 // dp
    states, wanted = [], []
    for _ in range(steps):
        states.append(json.dumps(whole.cursor.state()))
        wanted += tokens(whole, 1)
    assert json.loads(states[-1])["stream"]["lanes"][dp_rank]["place"]["epoch"] >= 2
    for step in range(steps):
        resumed = feed(config, dp_rank, dp, cursor=Cursor.from_state(json.loads(states[step])))
        assert tokens(resumed, min(6, steps - step)) == wanted[step : step + 6], step


@pytest.mark.full
def test_resume_twice_and_state_of_a_resumed_feed(stream_config: Callable[..., DataConfig]):
    config = stream_config(SHARDS)
    whole, resumed = feed(config), feed(config)
    for _ in range(12):
        resumed = feed(config, cursor=resumed.cursor)
        assert resumed.cursor.sequences == whole.cursor.sequences
        assert tokens(resumed, 3) == tokens(whole, 3)


def test_state_survives_torch_load_with_weights_only(stream_config: Callable[..., DataConfig]):
    one = feed(stream_config(SHARDS))
    tokens(one, 9)
    file = io.BytesIO()
    torch.save(one.cursor.state(), file)
    file.seek(0)
    assert Cursor.from_state(torch.load(file, weights_only=True)) == one.cursor


def test_a_document_longer_than_many_sequences(stream_config: Callable[..., DataConfig]):
    config = stream_config([["short"] * 6 + ["y" * 500, "", "z"]])
    rows = [row for batch in tokens(feed(config), 60) for row in batch]
    text = TOKENIZER.decode([token for row in rows for token in row[:11]])
    assert "y" * 500 in text and set(
        text.replace("y" * 500, "").replace("short", "").replace("z", "")
    ) <= {"y"}


def step_of(feeds: list[TrainFeed]) -> list[list[int]]:
    """Rows of a step of all ranks, in global order."""
    steps = [each.next_step() for each in feeds]
    return [row for m in zip(*steps, strict=True) for each in m for row in each.tokens_BS.tolist()]


def saved(feeds: list[TrainFeed]) -> Cursor:
    """The position that all ranks save together, through JSON."""
    return Cursor.merged([json.loads(json.dumps(each.cursor.state())) for each in feeds])


@pytest.mark.every(3)
@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("first", [1, 2, 4])
def test_any_number_of_ranks_continues_the_order(
    blended: bool, first: int, stream_config: Callable[..., DataConfig]
):
    """From one layout to others, twice, with other microbatches, read ahead or not."""
    alone, _ = load_data(stream_config([SHARDS[1] * 3, SHARDS[2]]), 11, 1, tokenizer=TOKENIZER)
    data = alone
    if blended:
        lengths = np.full(50, 7)
        packed = PackedSequences(lengths, lambda d, a, b: np.arange(a, b) + 300 + d, 11, seed=1)
        parts = [BlendPart("a", 2.0, True, alone.sequences), BlendPart("b", 1.0, True, packed)]
        data = DataSplit(BlendedSequences(tuple(parts)), None)

    def ranks(dp: int, micro_batch: int, cursor: Cursor) -> list[TrainFeed]:
        options = {"micro_batch": micro_batch, "num_microbatches": 8 // dp // micro_batch}
        return [TrainFeed(data, rank, dp, cursor=cursor, **options) for rank in range(dp)]

    whole = ranks(first, 2, Cursor())
    wanted = [step_of(whole) for _ in range(9)]
    for done in (1, 4):
        feeds = ranks(first, 2, Cursor())
        found = [step_of(feeds) for _ in range(done)]
        for dp, micro_batch in ((4, 1), (1, 2), (2, 4)):
            if dp < 4:
                feeds[0].look_ahead()
            feeds = ranks(dp, micro_batch, saved(feeds))
            found += [step_of(feeds)]
        feeds = ranks(first, 2, saved(feeds))
        found += [step_of(feeds) for _ in range(2)]
        assert found == wanted[: len(found)]


def test_ranks_of_a_new_run_read_a_lane_each(stream_config: Callable[..., DataConfig]):
    feeds = [feed(stream_config(SHARDS), rank, 2) for rank in range(2)]
    for _ in range(4):
        step_of(feeds)
    assert [[*each._reader.lanes._open] for each in feeds] == [[0], [1]]


def test_positions_of_an_earlier_version_continue(stream_config: Callable[..., DataConfig]):
    config = stream_config(SHARDS)
    feeds = [feed(config, rank, 2) for rank in range(2)]
    for _ in range(3):
        step_of(feeds)
    old = [
        {"sequences": 12, "stream": {"dp": 2, "dp_rank": rank, **each.cursor.stream["lanes"][rank]}}
        for rank, each in enumerate(feeds)
    ]
    for state in old:
        del state["stream"]["used"]
    again = [feed(config, rank, 2, Cursor.merged(old[::-1])) for rank in range(2)]
    assert step_of(again) == step_of(feeds)


def test_a_position_without_a_stream_is_refused(stream_config: Callable[..., DataConfig]):
    config = stream_config(SHARDS)
    with pytest.raises(
        ConfigError,
        match=r"data\.streaming=true: the saved position \(16 sequences\) is not a stream's",
    ):
        feed(config, cursor=Cursor(16))


def test_nothing_left_to_train_on(stream_config: Callable[..., DataConfig]):
    config = stream_config([["a" * 30] * 3], validation_documents=3)
    one = feed(config)
    with pytest.raises(
        ConfigError, match=r"data\.validation_documents=3: leaves rank 0 no document to train on"
    ):
        one.next_step()


def test_a_rank_whose_only_shard_is_held_out(stream_config: Callable[..., DataConfig]):
    """Rank 0 of 4 has the first shard, of 3 documents."""
    with pytest.raises(
        ConfigError, match=r"data\.validation_documents=5: leaves rank 0 no document"
    ):
        feed(stream_config(SHARDS), 0, 4).next_step()
    assert feed(stream_config(SHARDS), 1, 4).next_step()


def test_only_empty_documents_are_left(stream_config: Callable[..., DataConfig]):
    config = stream_config([["a" * 30] * 3 + ["", ""]], validation_documents=3)
    with pytest.raises(ConfigError, match=r"data\.validation_documents=3"):
        feed(config).next_step()


@pytest.mark.parametrize("dp", chosen([1, 2], [2]))
def test_parquet_stream_resumes(tmp_path: Path, dp: int):
    """Row groups are another reader of the library's, with a state of its own."""
    (tmp_path / "rows").mkdir()
    for i, shard in enumerate(SHARDS[1:]):
        table = pa.table({"id": range(len(shard)), "text": shard})
        parquet.write_table(table, tmp_path / "rows" / f"{i}.parquet", row_group_size=5)
    config = DataConfig(
        source=Source.hub,
        name=str(tmp_path / "rows"),
        streaming=True,
        validation_documents=5,
        cache_dir=str(tmp_path / "cache"),
    )
    whole = feed(config, 0, dp)
    cursors = []
    wanted = []
    for _ in range(30):
        cursors.append(whole.cursor)
        wanted += tokens(whole, 1)
    for step in range(0, 30, 2):
        resumed = feed(config, 0, dp, cursor=cursors[step])
        assert tokens(resumed, min(4, 30 - step)) == wanted[step : step + 4]


def test_one_block_is_read_ahead_at_most(stream_config: Callable[..., DataConfig]):
    train, _ = load_data(stream_config(SHARDS), 11, 1, tokenizer=TOKENIZER)
    texts = train.sequences._lane(0, 1, None).texts
    for used in range(1, 20):
        next(texts)
        assert len(texts._block) == 4 and texts.place.block == (used - 1) // 4


def test_failure_ahead_is_raised_when_batches_are_asked_for(
    stream_config: Callable[..., DataConfig],
):
    one = feed(stream_config(SHARDS))
    one.next_step()
    here, sample = one.cursor, one._reader.sample
    one._reader.sample = lambda index: 1 / 0
    for read in (one.look_ahead, one.next_step):
        with pytest.raises(ZeroDivisionError):
            read()
        one._reader.sample = sample
        assert one.cursor == here


def test_looking_ahead_does_not_move_the_cursor(stream_config: Callable[..., DataConfig]):
    config = stream_config(SHARDS)
    plain, looking = feed(config), feed(config)
    for _ in range(5):
        seen = looking.look_ahead()
        assert looking.cursor == plain.cursor and looking.look_ahead() is seen
        assert tokens(feed(config, cursor=looking.cursor), 2) == tokens(
            feed(config, cursor=plain.cursor), 2
        )
        assert looking.next_step() is seen and tokens(plain, 1) == [
            torch.cat([batch.tokens_BS, batch.labels_BS], dim=1).tolist() for batch in seen
        ]


def test_a_sequence_of_many_documents_ends_early(stream_config: Callable[..., DataConfig]):
    """Each token but the first of a document is predicted once, also behind a resumed position."""
    config = dataclasses.replace(stream_config(SHARDS), document_mask=True, max_documents=2)
    one = feed(config)
    steps = []
    for _ in range(6):
        cursor = Cursor.from_state(json.loads(json.dumps(one.cursor.state())))
        steps.append(one.next_step())
        (again,) = feed(config, cursor=cursor).next_step()
        assert torch.equal(again.labels_BS, steps[-1][0].labels_BS)
        assert torch.equal(again.ends_BD, steps[-1][0].ends_BD)
    batches = [batch for step in steps for batch in step]
    assert all(batch.ends_BD.shape == (2, 2) for batch in batches)
    predicted = torch.cat([batch.labels_BS.flatten() for batch in batches])
    found = TOKENIZER.decode(predicted[predicted >= 0].tolist())
    read = "".join(text[1:] for text in epoch_of(config, 0, 1))
    assert found == read[: len(found)] and len(found) > 60
    assert any((batch.labels_BS[:, -1] < 0).any() for batch in batches)
