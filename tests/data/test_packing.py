from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.data.packing import Documents, PackedSequences
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
        packed(numbered([9]), 4).reader(0, 1, 8, {"dp": 1})


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
