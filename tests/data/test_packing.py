from __future__ import annotations

from collections import Counter
from itertools import count, islice, pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.data.feed import make_batch
from app.data.packing import PADDING, Documents, PackedSequences
from app.errors import ConfigError


def packed(documents: Documents, seq_len: int, seed: int = 0) -> PackedSequences:
    return PackedSequences(documents.lengths_D, documents.read, seq_len, seed=seed)


def numbered(lengths: list[int]) -> Documents:
    """Documents whose tokens are all different: 0, 1, 2, … through the corpus."""
    starts = np.cumsum([0, *lengths])
    return Documents.from_lists([np.arange(a, b) for a, b in pairwise(starts)])


at_leisure = settings(deadline=None)  # other programs may have the processor


@at_leisure
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(1, 15),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_every_token_of_an_epoch_once_except_the_tail(
    lengths: list[int], seq_len: int, seed: int, epoch: int
):
    documents = numbered(lengths)
    assume(sum(lengths) > seq_len)
    sequences = packed(documents, seq_len, seed)
    rows = [sequences.sample(epoch * sequences.per_epoch + k) for k in range(sequences.per_epoch)]
    assert all(row.shape == (seq_len + 1,) and row.dtype == np.int64 for row in rows)
    inputs, targets = (
        Counter(np.concatenate([row[:-1] for row in rows])),
        Counter(np.concatenate([row[1:] for row in rows])),
    )
    assert set(inputs.values()) == set(targets.values()) == {1}
    dropped = sum(lengths) - sequences.per_epoch * seq_len
    assert len(inputs) == len(targets) == sum(lengths) - dropped and 1 <= dropped <= seq_len


@at_leisure
@given(st.lists(st.integers(1, 12), min_size=2, max_size=12), st.integers(1, 9))
def test_sequences_are_stretches_of_the_documents_in_some_order(lengths: list[int], seq_len: int):
    assume(sum(lengths) > seq_len)
    documents = numbered(lengths)
    sequences = packed(documents, seq_len, seed=3)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    last = set((np.cumsum(lengths) - 1).tolist())
    for k in range(sequences.per_epoch):
        row = sequences.sample(k)
        for a, b in pairwise(row):
            inside = b == a + 1 and owner[a] == owner[b]
            next_document = int(a) in last and int(b) - 1 in last | {-1}
            assert inside or next_document


END = 0


def texts_of(documents: list[list[int]]) -> Documents:
    """Texts of one or more documents of these lengths. All tokens differ, except the ends."""
    numbers = count(END + 1)
    return Documents.from_lists(
        [
            [token for n in lengths for token in (*islice(numbers, n - 1), END)]
            for lengths in documents
        ]
    )


def limited(texts: Documents, seq_len: int, most: int, seed: int = 0) -> PackedSequences:
    return PackedSequences(
        texts.lengths_D,
        texts.read,
        seq_len,
        seed=seed,
        max_documents=most,
        inside=texts.ends_inside(END),
    )


def cut_token_by_token(stream: list[int], seq_len: int, most: int) -> list[list[int]]:
    """The sequences of a stream; a short one has no token of the next."""
    found, start = [], 0
    while start + seq_len < len(stream):
        stop, documents = start + seq_len, 1
        for place in range(start, start + seq_len - 1):
            documents += stream[place] == END
            if documents > most:
                stop = place + 1
                break
        found.append(stream[start : stop + (stop == start + seq_len)])
        start = stop
    return found


@at_leisure
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=25),
    st.integers(2, 20),
    st.integers(1, 5),
    st.integers(0, 2),
)
def test_a_sequence_of_many_documents_ends_early(
    documents: list[list[int]], seq_len: int, most: int, epoch: int
):
    texts = texts_of(documents)
    assume(texts.lengths_D.sum() > seq_len)
    sequences = limited(texts, seq_len, most)
    first = 0
    for number in range(epoch + 1):
        sequences.sample(first)
        found = sequences._epoch
        assert (found.index, found.first) == (number, first)
        first += len(found.sequences_K)
    stream = [token for d in found.documents_D for token in texts.read(d, 0, 99).tolist()]
    rows = [sequences.sample(found.first + k) for k in np.argsort(found.sequences_K)]
    wanted = cut_token_by_token(stream, seq_len, most)
    assert [row[row != PADDING].tolist() for row in rows] == wanted
    batch = make_batch(rows, END, most)
    # each token of what is used is predicted once, except the first of a document
    predicted = Counter(batch.labels_BS[batch.labels_BS >= 0].tolist())
    used = stream[: int(found.stretches[-1]) + (len(wanted[-1]) > seq_len)]
    assert predicted == Counter(
        token for before, token in zip([END, *used], used, strict=False) if before != END
    )
    assert batch.ends_BD.shape == (len(rows), most) and (batch.ends_BD[:, -1] == seq_len).all()


def test_sequences_of_epochs_of_unequal_length_are_found_again():
    texts = texts_of([[2], [3, 1, 1], [9], [2, 2], [14], [1, 1], [3], [6]])
    sequences = limited(texts, 8, 2)
    rows = [sequences.sample(index).tolist() for index in range(60)]
    assert len({len(sequences._order(epoch, 0).sequences_K) for epoch in range(8)}) > 1
    for index in (59, 31, 0, 7):
        assert limited(texts, 8, 2).sample(index).tolist() == rows[index]
        assert sequences.sample(index).tolist() == rows[index]
    assert 0 < sequences.padding < 1 and limited(texts, 8, 8).padding == 0


def test_order_depends_on_seed_and_epoch_only():
    documents = numbered([5, 9, 4, 11, 8, 3])
    one, other = packed(documents, 4, seed=1), packed(documents, 4, seed=1)
    epoch = one.per_epoch
    forward = [one.sample(i).tolist() for i in range(3 * epoch)]
    backward = [other.sample(i).tolist() for i in reversed(range(3 * epoch))][::-1]
    assert forward == backward
    # other stretches, since the documents moved
    assert sorted(forward[:epoch]) != sorted(forward[epoch : 2 * epoch])
    assert forward[:epoch] != [
        packed(documents, 4, seed=2).sample(i).tolist() for i in range(epoch)
    ]
    assert packed(documents, 4, seed=1).per_epoch == (40 - 1) // 4


def test_tokens_follow_the_first_epoch():
    documents = numbered([5, 9, 4])
    tokens = packed(documents, 4, seed=1).tokens(100)
    assert sorted(tokens.tolist()) == list(range(18))
    assert packed(documents, 4, seed=1).tokens(7).tolist() == tokens[:7].tolist()


def test_too_small_for_one_sequence():
    with pytest.raises(
        ConfigError,
        match=r"train\.seq_len=8: the corpus has only 8 tokens, one .* 9; did you mean 7",
    ):
        packed(numbered([3, 5]), 8)
    assert packed(numbered([3, 5]), 7).per_epoch == 1
    with pytest.raises(ConfigError, match="has only 0 tokens") as empty:
        packed(Documents.from_lists([]), 8)
    assert empty.value.alternatives == ()


def test_a_stream_position_is_refused():
    with pytest.raises(ConfigError, match=r"data\.streaming"):
        packed(numbered([9]), 4).reader(1, 1, 8, {"dp": 1})


def test_arrow_chunks_are_viewed_not_copied():
    chunks = [
        pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.uint16())),
        pa.array([[7]], pa.list_(pa.uint16())),
    ]
    column = pa.chunked_array([chunks[0].slice(1), chunks[1]])
    documents = Documents.from_arrow(column)
    assert [
        documents.read(d, 0, 9).tolist()[: int(n)] for d, n in enumerate(documents.lengths_D)
    ] == [[3], [4, 5, 6], [7]]
    assert documents.read(1, 1, 3).tolist() == [5, 6] and documents.read(1, 1, 3).dtype == np.uint16
    assert np.shares_memory(documents.chunks[0], chunks[0].values.to_numpy())
    assert len(Documents.from_arrow(pa.chunked_array([], pa.list_(pa.uint16())))) == 0


@at_leisure
@given(st.integers(2, 300), st.floats(0.001, 0.999))
def test_split_takes_every_nth_document(count: int, fraction: float):
    train, validation = numbered([1] * count).split(fraction)
    held = [int(validation.read(d, 0, 1)[0]) for d in range(len(validation))]
    kept = [int(train.read(d, 0, 1)[0]) for d in range(len(train))]
    assert (
        sorted(held + kept) == list(range(count)) and held == sorted(held) and kept == sorted(kept)
    )
    assert len(held) == min(max(round(count * fraction), 1), count - 1)
    gaps = np.diff(held)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_a_single_document_is_cut():
    train, validation = numbered([100]).split(0.1)
    assert train.read(0, 0, int(train.lengths_D[0])).tolist() == list(range(90))
    assert validation.read(0, 0, int(validation.lengths_D[0])).tolist() == list(range(90, 100))
