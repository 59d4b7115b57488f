"""Files beside the weights of an exported model: config.json, generation config, tokenizer.

All are read before weights are written, so that a missing or broken file stops the export early.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from app.config import ModelConfig, Run
from app.data.special_tokens import GENERATION, SETTINGS, ids_with
from app.data.tokenizer import (
    BYTES,
    BYTES_END,
    BYTES_TURN,
    ByteTokenizer,
    bytes_as_json,
    json_tokenizer,
)
from app.data.tokenizer_files import TEMPLATE, TOKENIZER
from app.engine.start.kept_tokenizer import changed_end, find_tokenizer, kept_end
from app.errors import ConfigError, typed, writing
from app.hf.families import differences, same_files
from app.hf.family import Family
from app.hf.file_names import CONFIG_JSON
from app.hf.hub import CHAT_TEMPLATES, PRETRAINED, TEXTS, model_folder, texts_folder
from app.hf.their_model import TheirModel
from app.hf.tokenizer_files import TrainedTokenizer, with_tokenizer
from app.hf.wrapped import exported
from app.hf.write import as_json, write_all
from app.own_files import read_regular

END_IDS = "eos_token_id"
# keys about how weights were stored, or about remote code, which is not copied
NOT_KEPT = ("quantization_config", "dtype", "auto_map")


@dataclass(frozen=True, slots=True)
class ExportTexts:
    """Config and tokenizer files for the model of a checkpoint in `run_dir`."""

    run_dir: Path
    manifest: Mapping[str, Any]
    model: ModelConfig
    family: Family
    dtype: str  # of weights, in the notation of config.json
    key: str  # config key or argument that named the checkpoint, for messages
    say: Callable[[str], object]  # called with each omission, in words

    @property
    def config(self) -> Mapping[str, Any]:
        """Sections of the run's config.yaml."""
        found: Mapping[str, Any] = self.manifest["config"]
        return found

    def files(self) -> dict[str, bytes]:
        """Return name and contents of each file, config.json last.

        Raises ConfigError if one cannot be read.
        """
        source = self._source()
        if source is None:
            tokenizer = self._tokenizer(None)
            texts = {**with_tokenizer({}, tokenizer), **self._template()}
            return {**texts, CONFIG_JSON: as_json(self._new_config(tokenizer))}
        texts = read_texts(source, self.key)
        # `_source` has parsed it without error
        theirs = exported(json.loads(texts.pop(CONFIG_JSON)), self.family.architecture)
        if not self._untrained:
            texts, theirs = self._trained_texts(source, texts, theirs)
            texts = {**texts, **self._template()}
        return {**texts, CONFIG_JSON: as_json(self._their_config(theirs))}

    def _template(self) -> dict[str, bytes]:
        """Return the chat template that the run was trained with, if it was on conversations."""
        kept = self.run_dir / TEMPLATE
        return {TEMPLATE: kept.read_bytes()} if kept.is_file() else {}

    def _trained_texts(
        self, source: Path, texts: Mapping[str, bytes], theirs: dict[str, Any]
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Return texts and config.json of the initial model, with the tokenizer of its training.

        The end-of-document token of training is added to the ids that end generation: in the
        generation config, or in config.json if the former names none.
        """
        tokenizer = self._tokenizer(source)
        name = SETTINGS
        try:
            found = with_tokenizer(texts, tokenizer)
            if tokenizer is None:
                return _without_chat_templates(found), theirs
            name = GENERATION
            settings = _object(texts.get(GENERATION, b"{}"))
            ends = self._ends(tokenizer)
            if settings.get(END_IDS) is not None:
                more = _with_ends(settings, ends)
                return (found if more == settings else {**found, GENERATION: as_json(more)}), theirs
        except ValueError as error:
            rule = f"{name} cannot be read: {error}"
            raise ConfigError(self.key, source, rule) from error
        return found, _with_ends(theirs, ends)

    def _ends(self, tokenizer: TrainedTokenizer) -> tuple[int, ...]:
        """Return the ids that end a text: of a document, and of a turn if one token ends that."""
        kept = self.run_dir / TEMPLATE
        if not kept.is_file():
            return (tokenizer.end_id,)
        from app.data.chat_template import ChatTemplate  # imports jinja2

        template = ChatTemplate.of_file(kept, self.run_dir)
        added = json.loads(tokenizer.contents).get("added_tokens", ())
        special = {token["content"]: token["id"] for token in added if token["special"]}
        if self.config["data"]["tokenizer"] == BYTES and template.after_answer() == BYTES_TURN:
            special = {BYTES_TURN: ord(BYTES_TURN)}
        turn = template.end_of_turn(special)
        return (tokenizer.end_id,) if turn is None else (tokenizer.end_id, special[turn])

    @property
    def _untrained(self) -> bool:
        """True for an imported model that no run has trained yet, hence without a data section."""
        return "data" not in self.config

    def _source(self) -> Path | None:
        """Find the folder of the model that the run started from; None if it is gone."""
        kept = self.run_dir / PRETRAINED
        if (kept / CONFIG_JSON).exists():
            self._check_model(kept)
            return kept
        if self.model.init_from is None:
            return None
        try:
            found = texts_folder(self.model.init_from, self.key)
            self._check_model(found)
        except ConfigError as error:
            if self._untrained:
                raise
            self.say(f"config.json is written anew: {error}")
            return None
        return found

    def _check_model(self, folder: Path) -> None:
        """Raise ConfigError if a folder's config.json describes another model."""
        theirs = TheirModel.read(folder, self.key)
        found = theirs.model.with_behind(self.model)
        for field, ours, theirs in differences(self.model, found):
            rule = f"has model.{field}={typed(theirs)}, and the checkpoint {typed(ours)}"
            raise ConfigError(self.key, folder, f"{CONFIG_JSON} {rule}")
        if not same_files(theirs.family, self.family, self.model):
            rule = f"is of type {theirs.family.model_type}, and weights are of type"
            raise ConfigError(self.key, folder, f"{CONFIG_JSON} {rule} {self.family.model_type}")

    def _their_config(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return config.json of the initial model, changed only in how weights are stored."""
        kept = {name: value for name, value in found.items() if name not in NOT_KEPT}
        return {**self.family.behind.counted(kept, self.model), "torch_dtype": self.dtype}

    def _new_config(self, tokenizer: TrainedTokenizer | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "max_position_embeddings": self.config["train"]["seq_len"],
            **self.family.written(self.model),
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": self.dtype,
        }
        return found if tokenizer is None else _with_ends(found, self._ends(tokenizer))

    def _tokenizer(self, source: Path | None) -> TrainedTokenizer | None:
        """Return the tokenizer of training; None, after telling `say`, if it is gone."""
        name = self.config["data"]["tokenizer"]
        if name == BYTES:
            return TrainedTokenizer(bytes_as_json().encode(), BYTES_END, ByteTokenizer.eod)
        kept = self.run_dir / TOKENIZER
        besides = [] if source is None else [source / TOKENIZER]
        if (path := find_tokenizer(self.run_dir, self.manifest, besides)) is not None:
            if change := changed_end(self.manifest, str(path), kept=False):
                self.say(change)
            read = json_tokenizer(path, kept_end(self.manifest, str(path)))
            return TrainedTokenizer(path.read_bytes(), read.end, read.eod)
        state = "has other contents now" if Path(name).is_file() else "is not there"
        what = f"no tokenizer is written: {name}, which the model was trained with, {state}"
        self.say(f"{what}; copy the original file to {kept}")
        return None


def _object(contents: bytes) -> dict[str, Any]:
    found = json.loads(contents)
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def _with_ends(settings: dict[str, Any], ends: Sequence[int]) -> dict[str, Any]:
    ids = settings.get(END_IDS)
    for end in ends:
        ids = ids_with(end, ids)
    return {**settings, END_IDS: ids}


def read_texts(folder: Path, key: str) -> dict[str, bytes]:
    """Read the config and tokenizer files (no code) of a model folder, by name, sorted.

    Raises ConfigError if one cannot be read, as a dangling link in the hub's cache.
    """
    read = {}
    for path in sorted((*folder.iterdir(), *folder.glob(f"{CHAT_TEMPLATES}/*"))):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or not any(fnmatch(name, pattern) for pattern in TEXTS):
            continue
        try:
            read[name] = read_regular(path)
        except OSError as error:
            rule = f"{name} cannot be read: {error.strerror}"
            raise ConfigError(key, folder, rule) from error
    return read


def keep_texts(run: Run, run_dir: Path, checkpoint: Path | None = None) -> None:
    """Copy config and tokenizer files of the initial model into the run folder.

    A run that resumes from another folder's `checkpoint` copies the files kept there. Raises
    ConfigError.
    """
    if checkpoint is not None:
        key, kept = "resume", checkpoint.parent.parent / PRETRAINED
        if not kept.is_dir() or (run_dir / PRETRAINED).exists():
            return
        texts = read_texts(kept, key)
    elif run.model.init_from is None:
        return
    else:
        key = "model.init_from"
        texts = read_texts(model_folder(run.model.init_from, key, asks=False), key)
    with writing(run_dir):
        write_texts(run_dir, texts)


def write_texts(run_dir: Path, texts: Mapping[str, bytes]) -> None:
    """Write the files of an initial model into a run folder. Raises OSError."""
    (run_dir / PRETRAINED).mkdir(exist_ok=True)
    write_all(run_dir / PRETRAINED, texts)


def _without_chat_templates(texts: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: each for name, each in texts.items() if not name.startswith(CHAT_TEMPLATES)}
