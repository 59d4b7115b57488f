"""Generate text with a trained model: `python -m app.cli.generate RUN_OR_CHECKPOINT prompt=…`.

Texts go to stdout, everything else to stderr. Exit codes: 0; 2 for a mistake of the user, reported
in one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.cli.processes.ctrl_c import stop_quietly
from app.cli.processes.environment import environment

if __name__ == "__main__":
    # before the imports, which take seconds: Ctrl-C meanwhile prints one line
    stop_quietly("generate", speak=environment().get("RANK", "0") == "0")

import torch

from app.cli.options.request import Words, check_characters, text_lines
from app.cli.options.saved import saved_run
from app.cli.processes.launcher import Launch
from app.cli.start.launch import check_room
from app.cli.start.program import run_program
from app.cli.start.ranks import start_ranks
from app.cli.start.use_model import loaded_model
from app.config import Run
from app.data.faults import Fault
from app.data.tokenizer import Tokenizer
from app.engine.capture.recorder import CudaRecorder
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling
from app.engine.decoding.model_tokens import generation_ends
from app.engine.decoding.replicas import Replicas
from app.engine.decoding.texts import Continuation, drawn_tokens
from app.engine.decoding.trained import TrainedModel, WeightSource, weights_at
from app.engine.ranks.memory import memory_of
from app.engine.start.kept_tokenizer import changed_end
from app.engine.start.start import check_tokenizer, choose_device, usable_gpus
from app.errors import ConfigError, say, warn
from app.plan.formatting import byte_count, count_of
from app.planner.decoding import (
    DecodingSizes,
    check_decoding_length,
    check_decoding_memory,
    decoding_memory,
)
from app.planner.plan import Plan

OWN = (
    "prompt",
    "file",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "stop",
    "batch",
    "graph",
)
HELP = """\
== Graphfold: generate text with a trained model ==
Usage:  python -m app.cli.generate RUN_OR_CHECKPOINT prompt=TEXT [option …] [override …]

  RUN_OR_CHECKPOINT     a run folder (its newest checkpoint is used), a checkpoint saved at any
                        layout, or the folder of a Hugging Face model
  prompt=TEXT           text to continue; may be given several times
  file=PATH             file of prompts: one per line; of .jsonl the field "prompt" of every line
  max_new_tokens=200    most tokens to generate; fewer if the model's context ends before
  temperature=0.7       0 always takes the likeliest token
  top_k=N  top_p=P      sample from the N likeliest tokens; from the fewest with probability P
  seed=1                seed of sampling
  stop=TEXT             end a text before TEXT, a string or the name of a special token such as
                        '<|im_end|>'; may be given several times
  batch=16              prompts per forward pass
  graph=auto            capture decoding steps in a CUDA graph if possible; none: never
  override              any key of the configuration: train.device=cpu, parallel.tp=2,
                        precision.params=bfloat16, data.tokenizer=PATH, train.seq_len=N (context)

One process by default; parallel.tp=2 and the like start as many as they need; for several hosts,
python -m app.cli.torchrun … -m app.cli.generate …. Texts go to stdout.

Example:
  python -m app.cli.generate runs/<time>-<model> prompt='def ' temperature=0.5 stop='def '"""


@dataclass(frozen=True, slots=True)
class Request:
    """The command line."""

    words: Words
    prompts: tuple[str, ...]
    count: int  # most new tokens per prompt
    sampling: Sampling
    seed: int
    stop: tuple[str, ...]
    batch: int
    graphs: bool  # capture decoding steps if possible

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Request:
        """Parse the command line. Raises ConfigError for values out of range, unreadable files."""
        return cls.of(Words.parse(arguments, OWN))

    @classmethod
    def of(cls, words: Words) -> Request:
        """Check the options. Raises ConfigError as `parse`."""
        prompts = [*words.texts("prompt")]
        for name in words.all("file"):
            prompts += read_prompts(Path(name))
        if not prompts:
            advice = "give prompt=TEXT or file=PATH"
            raise ConfigError("prompt", "", "there is nothing to continue", advice=advice)
        if "" in prompts:
            raise ConfigError("prompt", "", "is empty: there is nothing to continue")
        for prompt in words.texts("prompt"):
            check_characters("prompt", prompt.encode(errors="replace").decode(), prompt)
        return cls(
            words,
            tuple(prompts),
            count=words.whole("max_new_tokens", 200),
            sampling=sampling_of(words),
            seed=words.whole("seed", 1, least=0),
            stop=stop_of(words),
            batch=words.whole("batch", 16),
            graphs=words.choice("graph", ("auto", "none")) == "auto",
        )


def sampling_of(words: Words) -> Sampling:
    """Return the sampling that the options ask for. Raises ConfigError."""
    return Sampling(
        words.number("temperature", 0.7),
        words.whole("top_k", 1) if words.text("top_k") else None,
        words.number("top_p", 1.0) if words.text("top_p") else None,
    )


def stop_of(words: Words) -> tuple[str, ...]:
    """Return the texts of stop=. Raises ConfigError."""
    if "" in words.all("stop"):
        raise ConfigError("stop", "", "is empty: every text would end at once")
    return words.texts("stop")


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a file. Raises ConfigError."""
    try:
        lines = text_lines(path)
    except Fault as fault:
        raise ConfigError("file", path, fault.rule, advice=fault.advice) from fault
    except OSError as error:
        raise ConfigError("file", path, f"cannot be read: {error.strerror}") from error
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError("file", path, "contains no prompt")
    if path.suffix != ".jsonl":
        return [line for _, line in found]
    return [_field(path, number, line) for number, line in found]


def _field(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        rule = f'line {number} must be a JSON object whose field "prompt" is a string'
        raise ConfigError("file", path, rule)
    check_characters("file", path, prompt, f"line {number} ")
    return prompt


def encoded(request: Request, run: Run, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the prompts' tokens. Raises ConfigError for a prompt that fills the whole context."""
    context = run.train.seq_len
    found = [list(map(int, ids)) for ids in tokenizer.encode_batch(request.prompts)]
    for text, ids in zip(request.prompts, found, strict=True):
        if len(ids) >= context:
            rule = f"has {len(ids)} tokens, and the model was trained on sequences of {context}"
            advice = f"give at most {context - 1}, or a longer train.seq_len"
            raise ConfigError("prompt", f"{text[:30]}…", rule, advice=advice)
        if not ids:
            raise ConfigError("prompt", text, "has no tokens")
    return found


def ends_of(
    given: Sequence[str], texts: Path, tokenizer: Tokenizer
) -> tuple[list[str], frozenset[int]]:
    """Return the strings and the tokens that end a text: those of the model, whose files are in the
    folder `texts`, and those `given` as stop=. Raises ConfigError as `apart`.
    """
    stop, ends = apart(given, tokenizer)
    return stop, ends | {*generation_ends(texts, tokenizer)}


def apart(given: Sequence[str], tokenizer: Tokenizer) -> tuple[list[str], frozenset[int]]:
    """Tell the strings that are to end a text from the special tokens. Raises ConfigError for a
    token inside a longer string, which could never match: generated text contains none.
    """
    special = tokenizer.special
    stop, ends = list[str](), set[int]()
    for text in given:
        if text in special:
            ends.add(special[text])
            continue
        for token in special:
            if token in text:
                rule = f"mixes the special token {token!r} with text, which can never match"
                advice = "give the special token alone"
                raise ConfigError("stop", text, rule, nearest=token, advice=advice)
        stop.append(text)
    return stop, frozenset(ends)


@dataclass(frozen=True, slots=True)
class WritingTask:
    """The checked request: tokens of the prompts, and what ends their texts. Loads no model."""

    request: Request
    run: Run
    tokenizer: Tokenizer
    prompts: list[list[int]]
    stop: list[str]
    ends: frozenset[int]  # tokens that end a text

    @classmethod
    def of(
        cls, request: Request, source: WeightSource, run: Run, *, tokenizer: Tokenizer
    ) -> WritingTask:
        """Check a request against the run in which the model at `source` is used. Raises
        ConfigError.
        """
        stop, ends = ends_of(request.stop, source.texts, tokenizer)
        prompts = encoded(request, run, tokenizer)
        return cls(request, run, tokenizer, prompts, stop=stop, ends=ends)

    @property
    def sizes(self) -> DecodingSizes:
        """Size of a replica's share of a batch: its sequences, the longest prompt, and the new
        tokens that still fit into the context.
        """
        longest = max(map(len, self.prompts))
        count = min(self.request.count, self.run.train.seq_len - longest)
        own = -(-min(self.request.batch, len(self.prompts)) // self.run.dp)
        return DecodingSizes(own, longest, count)

    def check(self, device: torch.device) -> None:
        """Raise ConfigError if the model cannot continue texts so long, or not on this device."""
        have = memory_of(self.run, device)
        check_decoding_length(self.run.model, self.sizes)
        check_decoding_memory(Plan(self.run), self.sizes, have, gpu=device.type == "cuda")


@dataclass(frozen=True, slots=True)
class Writer:
    """Continues prompts in batches; rank 0 prints, if `aloud`."""

    model: TrainedModel
    task: WritingTask
    aloud: bool = True

    @property
    def speaks(self) -> bool:
        """Return whether this rank prints."""
        return self.aloud and self.model.groups.rank == 0

    def write(self) -> list[str]:
        """Continue all prompts, batch by batch; return the texts after them. All ranks call it."""
        prompts, sizes = self.task.prompts, self.task.sizes
        captures = self.task.request.graphs and self.model.device.type == "cuda"
        recorder = CudaRecorder() if captures else None
        decoder = Decoder(self.model, sizes.sequences, sizes.tokens, recorder)
        together = Replicas(self.model.groups, sizes.sequences).together
        self._tell(self._outlook(decoder, len(prompts), sizes))
        since = time.perf_counter()
        texts: list[Continuation] = []
        try:
            for first in range(0, len(prompts), together):
                batch = prompts[first : first + together]
                texts += self._batch(decoder, first, batch, count=sizes.new)
        finally:
            if recorder is not None:  # before the process groups: graphs hold their communicators
                recorder.release()
        seconds = time.perf_counter() - since
        drawn = sum(len(text.tokens) for text in texts)
        self._tell(f"{drawn} tokens in {seconds:.1f} s: {drawn / seconds:,.0f} tokens/s")
        return [text.said + text.fresh(last=True) for text in texts]

    def _outlook(self, decoder: Decoder, prompts: int, sizes: DecodingSizes) -> str:
        """Return the opening line: prompts, new tokens, memory of keys and values."""
        replicas = Replicas(self.model.groups, sizes.sequences)
        several = self.model.groups.layout.dp
        on = f" on {several} replicas" if several > 1 else ""
        less = replicas.together < prompts
        together = f", {min(replicas.together, prompts)} together{on}" if less or on else ""
        limit = ", where the context ends" if sizes.new < self.task.request.count else ""
        steps = ""
        if self.model.device.type == "cuda" and self.task.request.graphs:
            how = "a CUDA graph" if decoder.eager is None else f"not captured, as {decoder.eager}"
            steps = f"; a step is {how}"
        memory = decoding_memory(self.model.plan, 0, sizes.sequences, tokens=sizes.tokens)
        per_layer = " to ".join(map(byte_count, sorted(set(memory.caches)) or [0]))
        return (
            f"{count_of(prompts, 'prompt')}{together}, of up to {count_of(sizes.prompt, 'token')}; "
            f"up to {count_of(sizes.new, 'new token')} each{limit}; keys and values take "
            f"{per_layer} per layer, {byte_count(decoder.nbytes)} per rank{steps}"
        )

    def _batch(
        self, decoder: Decoder, first: int, prompts: Sequence[list[int]], *, count: int
    ) -> list[Continuation]:
        """Continue the batch that begins with prompt `first`."""
        request, task = self.task.request, self.task
        texts = [
            Continuation(task.tokenizer, task.stop, prompt, ends=task.ends) for prompt in prompts
        ]
        page = _Page(request.prompts, first, texts) if self.speaks else None
        together = Replicas(self.model.groups, decoder.sequences).together
        nobody = [[0]] * (together - len(prompts))  # the last batch is padded to full size
        for tokens in drawn_tokens(
            decoder,
            [*prompts, *nobody],
            count,
            sampling=request.sampling,
            seed=request.seed + first,
            vocab=task.tokenizer.vocab_size,
            ended=lambda: all(text.ended for text in texts),
        ):
            for text, token in zip(texts, tokens, strict=False):
                text.add(token)
            if page is not None:
                page.show()
        if page is not None:
            page.show(last=True)
        return texts

    def _tell(self, line: str) -> None:
        if self.speaks:
            say(line, sys.stderr)


class _Page:
    """Prints the texts of a batch in order: each streams once the texts above it are complete."""

    def __init__(self, prompts: Sequence[str], first: int, texts: Sequence[Continuation]) -> None:
        self.prompts = prompts
        self.first = first
        self.texts = texts
        self.at = 0
        self._begin()

    def _begin(self) -> None:
        number = self.first + self.at
        if len(self.prompts) > 1:
            print(f"== {number + 1} of {len(self.prompts)} ==")
        print(self.prompts[number], end="", flush=True)

    def show(self, last: bool = False) -> None:
        """Print the text that has been generated since the last call."""
        while self.at < len(self.texts):
            text = self.texts[self.at]
            print(text.fresh(last), end="", flush=True)
            if not (text.ended or last):
                return
            print(flush=True)
            self.at += 1
            if self.at < len(self.texts):
                self._begin()


def generate(arguments: Sequence[str], launch: Launch) -> int:
    """Generate on this rank, or start the ranks that the layout asks for; return the exit code."""
    request = Request.parse(arguments)
    source = weights_at(request.words.source)
    run = saved_run(source.config, request.words.overrides, launch.world_size)
    tokenizer = check_tokenizer(run, source.manifest)
    task = WritingTask.of(request, source, run, tokenizer=tokenizer)
    if launch.world_size is None and run.world_size > 1:
        check_room(run, usable_gpus(run))
        return start_ranks(run.world_size, __file__, arguments, env=environment())
    note = changed_end(source.manifest, run.data.tokenizer, kept=False)
    if note is not None and launch.rank == 0:
        warn(note, "generate")
    task.check(choose_device(run, launch.local_rank))
    with loaded_model(source, run, launch) as model:
        Writer(model, task).write()
    return 0


def main(arguments: Sequence[str], parent: int) -> int:
    """Run the command line of this process, started by process `parent`; return the exit code."""
    return run_program("generate", HELP, arguments, parent=parent, work=generate)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.getppid()))
