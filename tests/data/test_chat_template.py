"""Chat templates give the text and tokens that `apply_chat_template` of `transformers` gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.data.chat_template import ChatTemplate
from app.data.tokenizer import load_tokenizer
from app.errors import ConfigError
from tests.hf_folders import transformers
from tests.integration.model_ends import SPECIAL, tokenizer_of_words

SYSTEM = {"role": "system", "content": "the fox"}
QUICK = {"role": "user", "content": "the quick <b>"}
BROWN = {"role": "assistant", "content": "brown fox"}
TURNS = (SYSTEM, QUICK, BROWN, {"role": "user", "content": "jumps"})
BY_TURNS = """\
{{ bos_token }}{% for message in messages %}
    {%- if message.role == 'assistant' %}
<turn>{% generation %}{{ message.content }}<turn>{% endgeneration %}

    {%- else %}
<turn>{{ message['role'] + '\\n' + message.content | trim }}<turn>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<turn>{% endif %}
"""
TEMPLATES = {
    "turns": BY_TURNS,
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, ensure_ascii=True) }}",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m.content }}{{ eos_token }}{{ pad_token }}{% endfor %}",
    "names": "{% if tools is none and documents is none %}{{ unk_token is defined }}{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% generation %}"
    "{% set ns.n = ns.n + 1 %}{% set own = 1 %}{% endgeneration %}{{ own is defined }}"
    "{% endfor %}{{ ns.n }}",
    "year": "{{ strftime_now('%Y') }}",
}


def save_model(folder: Path, **settings: object) -> None:
    tokenizer_of_words().save(str(folder / "tokenizer.json"))
    named = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("place", ["file", "settings", "list"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_tokens_equal_those_of_transformers(name: str, place: str, tmp_path: Path):
    template = TEMPLATES[name]
    if place == "file":  # which comes before the settings
        save_model(tmp_path, chat_template="other")
        (tmp_path / "chat_template.jinja").write_text(template)
    elif place == "settings":
        save_model(tmp_path, chat_template=template)
    else:
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
        save_model(tmp_path, chat_template=named)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found, tokenizer = ChatTemplate.find(tmp_path), load_tokenizer(f"{tmp_path}/tokenizer.json")
    assert found is not None
    for count in (2, 3, 4):
        for answers in (True, False):
            words = {"add_generation_prompt": answers}
            text = theirs.apply_chat_template(TURNS[:count], tokenize=False, **words)
            assert found.text(TURNS[:count], answers) == text
            ids = theirs.apply_chat_template(TURNS[:count], return_dict=False, **words)
            assert tokenizer.encode(text) == ids


def test_end_of_turn_is_the_token_after_an_answer(tmp_path: Path):
    ends = {
        BY_TURNS: "<turn>",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ eos_token }}": "</s>",
        "{% for m in messages %}{{ m.content }} end{% endfor %}": None,
        "{{ messages[0].content }}": None,
        "{{ raise_exception('no') }}": None,
    }
    for template, end in ends.items():
        save_model(tmp_path, chat_template=template)
        found = ChatTemplate.find(tmp_path)
        assert found is not None and found.end_of_turn(SPECIAL) == end, template


def test_model_without_a_template_has_none(tmp_path: Path):
    save_model(tmp_path)
    assert ChatTemplate.find(tmp_path) is None and ChatTemplate.find(tmp_path / "no") is None


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        ("{{ raise_exception('turns must alternate') }}", "conversation: turns must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses the conversation: can only concatenate"),
        ("{{ nobody.content }}", "refuses the conversation: 'nobody' is undefined"),
        ("{{ messages.append(1) }}", "refuses the conversation: access to .*append.* unsafe"),
        ("\n{% for %}", "line 2: "),
        (7, "chat_template is no text and no list with one named default; give template=FILE"),
        ([{"name": "rag", "template": ""}], "no list with one named default"),
    ],
)
def test_mistakes_of_a_template_are_one_line(template: object, rule: str, tmp_path: Path):
    save_model(tmp_path, chat_template=template)
    with pytest.raises(ConfigError, match=f"^template=.*tokenizer_config.json: .*{rule}"):
        found = ChatTemplate.find(tmp_path)
        assert found is not None
        found.text(TURNS)


def test_missing_file_is_told_with_the_nearest(tmp_path: Path):
    (tmp_path / "chatml.jinja").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.* mean chatml\.jinja"):
        ChatTemplate.of_file(tmp_path / "chatlm.jinja", tmp_path)
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is no UTF-8"):
        ChatTemplate.of_file(tmp_path / "bytes.jinja", tmp_path)
