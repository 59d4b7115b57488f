"""Conversations longer than a sequence are cut, dropped or refused, and the loss is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.choices import Packing, Source, Truncate
from app.config import DataConfig
from app.data.load import load_data
from app.data.marks import ids_of_marked, marked, trained
from app.data.packing import PADDING, Documents
from app.data.tokenizer import load_tokenizer
from app.data.truncate import truncated
from app.errors import ConfigError

T, F = True, False
MASKS = [  # of conversations: which tokens are trained
    [F, T, T],
    [F, F, F, F, F, F, T],  # its end alone
    [F, T, F, F, F, F, F, T, T],  # an answer at either end
    [F, T, T, F, F, F, F, F],  # its beginning alone
    [T, F, F, F, F],  # fits; its first token is never predicted
]
LENGTHS = [len(mask) for mask in MASKS]
SIZE = 5  # tokens that fit, the first of them not predicted


def documents() -> Documents:
    found = [marked(np.arange(len(mask)) + 100 * n, np.array(mask)) for n, mask in enumerate(MASKS)]
    return Documents.from_lists(found)


def ids(found: Documents) -> list[list[int]]:
    return [
        ids_of_marked(found.read(number, 0, int(length))).tolist()
        for number, length in enumerate(found.lengths_D)
    ]


KEPT = {  # conversation, first token and length of what is kept
    Truncate.right: ([(0, 0, 3), (2, 0, 5), (3, 0, 5), (4, 0, 5)], (7 + 4 + 3, 1 + 2 + 0)),
    Truncate.left: ([(0, 0, 3), (1, 2, 5), (2, 4, 5), (4, 0, 5)], (2 + 4 + 8, 0 + 1 + 2)),
    Truncate.drop: ([(0, 0, 3), (4, 0, 5)], (7 + 9 + 8, 1 + 3 + 2)),
}


@pytest.mark.parametrize("how", KEPT)
def test_cut_conversations_and_their_lost_tokens(how: Truncate):
    found = truncated(documents(), SIZE - 1, how)
    kept, (tokens, lost) = KEPT[how]
    assert ids(found.documents) == [
        list(range(100 * n + first, 100 * n + first + length)) for n, first, length in kept
    ]
    share = f"{lost / 6:.1%}"
    said = (
        f"3 of 5 conversations are longer than train.seq_len=4: data.truncate={how.value} leaves "
        f"out {tokens} tokens, {lost} of them trained ({share} of theirs)"
    )
    dropped = "; 1 conversation without a trained token left dropped"
    assert found.said == said + ("" if how is Truncate.drop else dropped)


def test_long_conversations_may_end_the_start():
    with pytest.raises(ConfigError, match=r"data.truncate=error: 3 of 5 .*longest needs 8") as end:
        truncated(documents(), SIZE - 1, Truncate.error)
    assert "train.seq_len=8" in str(end.value)
    assert truncated(documents(), 8, Truncate.error).said is None


def test_nothing_left_to_train_on_is_refused():
    only = documents().select(np.array([1]))
    with pytest.raises(ConfigError, match=r"train.seq_len=4: 1 of 1 conversations.* none has a"):
        truncated(only, SIZE - 1, Truncate.right)


def config_of(path: Path, lengths: list[int], **named: Any) -> DataConfig:
    file = path / "rows.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "ask"},
                      {"role": "assistant", "content": "a" * length + "z"}]}
        for length in lengths
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"document_mask": True, "packing": Packing.best_fit} | named
    return DataConfig(source=Source.chat, path=str(file), chat_template="chatml",
                      cache_dir=str(path / "cache"), **named)  # fmt: skip


def test_both_splits_are_cut_and_told(tmp_path: Path):
    lengths = [3] * 20
    lengths[0] = lengths[10] = 400
    config = config_of(tmp_path, lengths, truncate=Truncate.left, validation_fraction=0.05)
    train, held = load_data(config, 120, 0, load_tokenizer("bytes"))
    assert train.cut and held.cut
    assert train.cut.startswith("1 of 19 conversations for training are longer than train.seq_len")
    assert held.cut.startswith("1 of 1 conversations for validation are longer")
    (row,) = [held.sequences.sample(index) for index in range(held.sequences.per_epoch)]
    tail = "a" * (121 - len("z<|im_end|>\n")) + "z<|im_end|>\n"
    assert bytes(ids_of_marked(row).tolist()).decode() == tail
    assert PADDING not in row and trained(row).sum() == 120


def test_truncation_that_nothing_reads_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data.truncate=left: is read by data=chat"):
        DataConfig(truncate=Truncate.left)
    with pytest.raises(ConfigError, match=r"data.packing=stream cuts conversations"):
        config_of(tmp_path, [1], truncate=Truncate.drop, packing=Packing.stream)


def test_one_conversation_is_not_divided(tmp_path: Path):
    config = config_of(tmp_path, [30])
    with pytest.raises(ConfigError, match=r"rows.jsonl: one conversation in all.*data.validation"):
        load_data(config, 20, 0, load_tokenizer("bytes"))
