"""Conversations become the tokens and masks of `apply_chat_template` of `transformers`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from app.choices import Packing, Source
from app.config import DataConfig
from app.data.feed import IGNORED, make_marked_batch
from app.data.load import load_data, load_whole, prepare
from app.data.marks import ends, ids_of_marked, marked, trained
from app.data.packing import PADDING
from app.data.prepared import map_tokens
from app.data.sources import find_sources
from app.data.tokenizer import load_tokenizer
from app.errors import ConfigError
from tests.hf_folders import transformers

NAMES = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>",
         "<turn>", "</turn>", "[ASK]", "[/ASK]", "[TOOLS]")  # fmt: skip
# << and >> stand for the tags that mark what the assistant says.
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}<<{{ m.content + '<|im_end|>' }}>>"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}<<{{ m['content'] | trim }}<|eot|>>>"
    "{% else %}{{ m['content'] | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<turn>model\n' }}"
    "<<{{ m.content | trim }}</turn>>>{% else %}"
    "{{ '<turn>' + m.role + '\n' + m.content | trim + '</turn>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
ASKS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[ASK] ' + m.content + ' [/ASK]' }}"
    "{% else %}<<{{ ' ' + m.content + eos_token }}>>{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "heads": HEADS, "turns": TURNS, "asks": ASKS}
WORDS = "what is the capital of france paris hello how are you fine thanks naïve 🦊 fox"
LONG = [
    {"role": "user", "content": "what is the capital"},
    {"role": "assistant", "content": "paris 🦊 naïve, fine"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine thanks"},
]
SHORT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello fox"}]


def with_marks(source: str) -> str:
    marked = re.sub(">>(?!>)", "{% endgeneration %}", source)
    return marked.replace("<<", "{% generation %}")


def without_marks(source: str) -> str:
    return re.sub(">>(?!>)", "", source).replace("<<", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(NAMES),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS] * 3, trainer)
    found = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(found / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (found / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<s>"}))
    return found


def config_of(folder: Path, rows: Sequence[object], path: Path, **named: Any) -> DataConfig:
    path.mkdir(exist_ok=True)
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "template" in named:
        template = path / "template.jinja"
        template.write_text(named.pop("template"))
        named["chat_template"] = str(template)
    named = {"document_mask": True, "packing": Packing.best_fit} | named
    return DataConfig(
        source=Source.chat,
        path=str(file),
        cache_dir=str(path / "cache"),
        tokenizer=named.pop("tokenizer", str(folder)),
        **named,
    )


def documents_of(config: DataConfig) -> list[np.ndarray]:
    prepared = prepare(config, load_tokenizer(config.tokenizer))
    assert prepared is not None
    found = map_tokens(prepared)
    return [found.read(d, 0, int(found.lengths_D[d])) for d in range(len(found))]


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_equal_those_of_transformers(
    name: str, marks: bool, folder: Path, tmp_path: Path
):
    """Without marks in ours, what is trained is told by prefixes; theirs always has marks."""
    source = TEMPLATES[name]
    used = with_marks(source) if marks else without_marks(source)
    config = config_of(folder, [{"messages": LONG}, {"messages": SHORT}], tmp_path, template=used)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for messages, tokens in zip((LONG, SHORT), documents_of(config), strict=True):
        wanted = theirs.apply_chat_template(
            messages,
            chat_template=with_marks(source),
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        assert ids_of_marked(tokens).tolist() == wanted["input_ids"]
        assert trained(tokens).astype(int).tolist() == wanted["assistant_masks"]
        assert sum(wanted["assistant_masks"]) > 2
        assert np.flatnonzero(ends(tokens, eod=1)).tolist() == [len(tokens) - 1]


FORMS: Mapping[str, Mapping[str, Any]] = {
    "messages": {"messages": SHORT},
    "texts": {"prompt": "hello", "completion": "hello fox"},
    "lists": {"prompt": SHORT[:1], "completion": SHORT[1:]},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "hello"},
            {"from": "gpt", "value": "hello fox"},
        ]
    },
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_rows_gives_equal_tokens(
    form: str, ending: str, folder: Path, tmp_path: Path
):
    config = config_of(folder, [FORMS[form]], tmp_path, chat_template="chatml")
    if ending == "parquet":
        parquet.write_table(pa.Table.from_pylist([dict(FORMS[form])]), config.path[0])
    (tokens,) = documents_of(config)
    tokenizer = load_tokenizer(str(folder))
    said = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello fox<|im_end|>\n"
    assert ids_of_marked(tokens).tolist() == list(tokenizer.encode(said))
    assert ids_of_marked(tokens[trained(tokens)]).tolist() == list(
        tokenizer.encode("hello fox<|im_end|>")
    )


def test_tools_and_system_turns_reach_the_template(folder: Path, tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "fox"}}]
    rows = [
        {"messages": [{"role": "system", "content": "fine"}, *SHORT], "tools": given}
        for given in (tools, json.dumps(tools))
    ]
    one, other = documents_of(config_of(folder, rows, tmp_path, template=with_marks(CHATML)))
    assert one.tolist() == other.tolist()
    text = load_tokenizer(str(folder)).decode(ids_of_marked(one).tolist())
    assert text.startswith("system\n" + json.dumps(tools)) and "system\nfine" in text


def test_bytes_are_trained_by_their_characters(tmp_path: Path):
    config = config_of(tmp_path, [{"messages": LONG}], tmp_path, chat_template="chatml",
                       tokenizer="bytes")  # fmt: skip
    (tokens,) = documents_of(config)
    said = bytes(ids_of_marked(tokens[trained(tokens)]).tolist()).decode()
    assert said == "paris 🦊 naïve, fine<|im_end|>fine thanks<|im_end|>"


BAD: Mapping[str, tuple[Any, str]] = {
    "order": ([*SHORT, SHORT[1]], "message 3, of assistant, follows one of assistant"),
    "first": (SHORT[1:], "message 1, of assistant, is the first"),
    "no answer": (SHORT[:1], "has no turn of the assistant"),
    "none": ([], "has no turn of the assistant"),
    "role": ([{"role": "robot", "content": "x"}], "message 1 has the role 'robot'"),
    "empty": ([SHORT[0], {"role": "assistant", "content": " "}], "of assistant, is empty"),
    "no text": ([{"role": "user", "content": [1]}], "message 1, of user, holds no text"),
    "marks": ([{"role": "user", "content": "\ufdd0"}], "message 1 holds U.FDD0"),
    "list": ({"role": "user"}, "holds no list of objects in 'messages'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_conversations_name_file_and_row(case: str, folder: Path, tmp_path: Path):
    messages, rule = BAD[case]
    rows = [{"messages": SHORT}, {"messages": messages}]
    config = config_of(folder, rows, tmp_path, chat_template="chatml")
    with pytest.raises(ConfigError, match=rule) as found:
        documents_of(config)
    said = str(found.value)
    assert said.startswith(f"data.path={config.path[0]}: line 2") and "\n" not in said


ROWS: Mapping[str, tuple[Any, str]] = {
    "form": ({"conversations": []}, "line 2 has no 'messages', as the first one"),
    "json": ("{", "line 2 is not JSON"),
    "tools": ({"messages": SHORT, "tools": 1}, "line 2 holds tools that are no list"),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_another_form_are_refused(case: str, folder: Path, tmp_path: Path):
    row, rule = ROWS[case]
    config = config_of(folder, [{"messages": SHORT}], tmp_path, chat_template="chatml")
    with Path(config.path[0]).open("a") as file:
        file.write(row if isinstance(row, str) else json.dumps(row))
    with pytest.raises(ConfigError, match=rule):
        documents_of(config)


MISTAKEN = {
    "no end": ("{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}",
               "line 1 would not teach where a turn ends: .* ends with 'fine thanks'"),
    "end outside": (with_marks(CHATML.replace(" + '<|im_end|>' }}>>", " }}>><|im_end|>")),
                    "would not teach"),
    "no prefix": ("{% for m in messages %}{{ m.content }}{% if loop.last %}</s>{% endif %}"
                  "{% endfor %}", "messages up to 1.*'what is .* instead of '.*</s>'"),
    "refuses": ("{{ raise_exception('no, thanks') }}", "line 1: template.jinja .*no, thanks"),
    "marks nothing": ("{% if false %}{% generation %}{% endgeneration %}{% endif %}",
                      "the template marks nothing in it"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKEN)
def test_templates_that_teach_no_turn_are_refused(case: str, folder: Path, tmp_path: Path):
    template, rule = MISTAKEN[case]
    config = config_of(folder, [{"messages": LONG}], tmp_path, template=template)
    with pytest.raises(ConfigError, match=rule) as found:
        documents_of(config)
    assert "\n" not in str(found.value)


def test_tokenizer_without_a_template_names_chatml(folder: Path, tmp_path: Path):
    config = config_of(folder, [{"messages": SHORT}], tmp_path)
    with pytest.raises(ConfigError, match=r"data.chat_template=null: .*chatml"):
        find_sources(config)


def test_another_template_makes_another_record(folder: Path, tmp_path: Path):
    one = find_sources(
        config_of(folder, [{"messages": SHORT}], tmp_path, template=with_marks(CHATML))
    )
    other = find_sources(
        config_of(folder, [{"messages": SHORT}], tmp_path, template=without_marks(HEADS))
    )
    assert one.record()["sum"] != other.record()["sum"]


def test_template_without_conversations_is_refused():
    with pytest.raises(ConfigError, match="is read by data=chat"):
        DataConfig(chat_template="chatml")


def test_marked_tokens_say_their_ids_and_kinds():
    tokens = np.concatenate(
        (marked(np.array([0, 9, 2**29 - 2]), np.array([0, 1, 0])), [9, PADDING])
    )
    assert ids_of_marked(tokens).tolist() == [0, 9, 2**29 - 2, 9, PADDING]
    assert trained(tokens).tolist() == [False, True, False, True, False]
    assert ends(tokens, eod=9).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("mask", [True, False])
def test_batches_predict_trained_tokens_alone(
    packing: Packing, mask: bool, folder: Path, tmp_path: Path
):
    """Each is predicted once per epoch, and an end of a turn cuts no conversation."""
    if packing is Packing.best_fit and not mask:
        return
    rows = [{"messages": [*SHORT, *LONG] * (1 + n % 2)} for n in range(9)]
    asks = without_marks(ASKS)  # its turns end with the end-of-document token
    config = config_of(folder, rows, tmp_path, template=asks, document_mask=mask, packing=packing)
    tokenizer = load_tokenizer(config.tokenizer)
    documents = documents_of(config)
    length = max(map(len, documents)) + 1
    split = load_whole(config, length, 3, tokenizer)
    assert split.marked and split.cut is None
    rows_BS1 = [split.sequences.sample(n) for n in range(split.sequences.per_epoch)]
    batch = make_marked_batch(rows_BS1, split.boundary, split.max_documents)
    counted = sum(int(trained(tokens).sum()) for tokens in documents)
    found = int((batch.labels_BS != IGNORED).sum())
    assert found == counted if packing is Packing.best_fit else 0 < found <= counted
    for row, labels_S in zip(rows_BS1, batch.labels_BS, strict=True):
        said = trained(row[1:])
        assert (labels_S.numpy() != IGNORED).tolist() == said.tolist()
        assert labels_S[said].tolist() == ids_of_marked(row[1:])[said].tolist()
    starts = int((batch.positions_BS == 0).sum())
    held = sum(int(ends(row[:-2], 1).sum()) for row in rows_BS1) if mask else 0
    padded = [row for row in rows_BS1 if mask and PADDING in row[:-1]]
    last = sum(int(ends(row[row != PADDING][-1:], 1).sum()) for row in padded)
    assert starts == len(rows_BS1) + held - last
    assert batch.tokens_BS.min() >= 0


def test_long_conversations_keep_their_beginning(folder: Path, tmp_path: Path):
    rows = [{"messages": LONG * 3 if n == 4 else SHORT} for n in range(12)]
    config = config_of(folder, rows, tmp_path, chat_template="chatml")
    documents = documents_of(config)
    length = len(documents[0]) + 3
    train, _ = load_data(config, length, 0, load_tokenizer(config.tokenizer))
    lost = len(documents[4]) - length - 1
    assert train.cut is not None
    assert f"1 of 11 conversations are longer than train.seq_len={length}" in train.cut
    assert f"{lost} tokens" in train.cut
    sequences = train.sequences
    rows_BS1 = [sequences.sample(n) for n in range(sequences.per_epoch)]
    kept = [row.tolist() for row in rows_BS1 if PADDING not in row]
    assert kept == [documents[4][: length + 1].tolist()]


def test_conversations_cut_before_an_answer_are_left_out(folder: Path, tmp_path: Path):
    ask = {"role": "user", "content": "how long is it " * 9}
    long = [ask, {"role": "assistant", "content": "long"}]
    rows = [{"messages": long if n % 2 else SHORT} for n in range(12)]
    config = config_of(folder, rows, tmp_path, chat_template="chatml")
    length = len(documents_of(config)[0]) + 3
    train, _ = load_data(config, length, 0, load_tokenizer(config.tokenizer))
    for index in range(train.sequences.per_epoch):
        tokens = train.sequences.sample(index)
        assert trained(tokens[1:]).any() and ends(tokens[tokens != PADDING], 1).any()
    (tmp_path / "silent").mkdir()
    rows = [{"messages": long}] * 4
    silent = config_of(folder, rows, tmp_path / "silent", chat_template="chatml")
    with pytest.raises(ConfigError) as error:
        load_data(silent, length, 0, load_tokenizer(silent.tokenizer))
    assert "every conversation of the training split is cut before its first answer" in str(
        error.value
    )
    assert error.value.nearest is not None
    load_data(silent, int(error.value.nearest), 0, load_tokenizer(silent.tokenizer))


def test_several_processes_prepare_equal_tokens(folder: Path, tmp_path: Path):
    rows = [{"messages": LONG if n % 3 else SHORT} for n in range(40)]
    one = documents_of(config_of(folder, rows, tmp_path / "one", chat_template="chatml"))
    two = documents_of(
        config_of(folder, rows, tmp_path / "two", chat_template="chatml", num_proc=2)
    )
    assert [tokens.tolist() for tokens in one] == [tokens.tolist() for tokens in two]
    assert torch.tensor(one[0]).dtype == torch.int32
