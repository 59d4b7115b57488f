"""Talk with a trained model: `python -m app.cli.chat RUN_OR_FOLDER`.

Answers go to stdout, everything else to stderr. Exit codes: 0; 2 for a mistake of the user,
reported in one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.cli.processes.ctrl_c import stop_quietly

if __name__ == "__main__":
    stop_quietly("chat")  # before the imports, which take seconds

import torch

from app.cli.chat_server import Defaults, Server
from app.cli.chat_terminal import DURING, Terminal
from app.cli.generate import ends_of, sampling_of, stop_of
from app.cli.options.request import Words, check_characters
from app.cli.options.saved import saved_run
from app.cli.processes.launcher import Launch
from app.cli.start.program import run_program
from app.cli.start.use_model import loaded_model
from app.config import Run
from app.data.chat_template import ChatTemplate
from app.data.special_tokens import SETTINGS
from app.data.tokenizer import BYTES, Tokenizer
from app.data.tokenizer_files import TEMPLATE, tokenizer_file
from app.engine.capture.recorder import CudaRecorder
from app.engine.decoding.conversation import CachedText, Speaker
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling
from app.engine.decoding.trained import TrainedModel, WeightSource, weights_at
from app.engine.ranks.groups import create_groups
from app.engine.ranks.memory import memory_of
from app.engine.start.kept_tokenizer import changed_end
from app.engine.start.start import check_tokenizer, choose_device
from app.errors import ConfigError, say, warn
from app.planner.decoding import (
    DecodingSizes,
    check_decoding_length,
    check_decoding_memory,
    decoding_memory,
)
from app.planner.plan import Plan

OWN = (
    "system",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "stop",
    "template",
    "beside",
    "serve",
    "graph",
)
HELP = f"""\
== Graphfold: talk with a trained model ==
Usage:  python -m app.cli.chat RUN_OR_FOLDER [option …] [override …]

  RUN_OR_FOLDER         a run folder (its newest checkpoint is used), a checkpoint saved at any
                        layout, or the folder of a Hugging Face model
  system=TEXT           instructions before the conversation
  beside=RUN_OR_FOLDER  a second model, which answers too: beside the first on a wide terminal
  serve=PORT            answer at http://127.0.0.1:PORT instead: a page, and the interface of
                        OpenAI's chat completions (/v1/chat/completions, /v1/models)
  template=FILE         chat template (Jinja) in place of the model's own
  max_new_tokens=N      most tokens of an answer; else as many as the context holds
  temperature=0.7       0 always takes the likeliest token
  top_k=N  top_p=P      sample from the N likeliest tokens; from the fewest with probability P
  seed=1                seed of sampling
  stop=TEXT             end an answer before TEXT; may be given several times
  graph=auto            capture decoding steps in a CUDA graph if possible; none: never
  override              any key of the configuration: train.device=cpu, train.seq_len=N (context)

{DURING}

A model without a chat template continues the text of all turns. One process.

Example:
  python -m app.cli.chat runs/<time>-<model> system='Answer in one line.' temperature=0.3"""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The command line."""

    words: Words
    system: str | None
    count: int  # most new tokens of an answer
    sampling: Sampling
    seed: int
    stop: tuple[str, ...]
    template: Path | None
    beside: Path | None
    serve: int | None  # port; 0 takes a free one
    graphs: bool  # capture decoding steps if possible

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> ChatRequest:
        """Parse the command line. Raises ConfigError."""
        words = Words.parse(arguments, OWN)
        for system in words.texts("system"):
            check_characters("system", system.encode(errors="replace").decode(), system)
        template, beside = words.text("template"), words.text("beside")
        return cls(
            words,
            system=next(reversed(words.texts("system")), None),
            count=words.whole("max_new_tokens", sys.maxsize),
            sampling=sampling_of(words),
            seed=words.whole("seed", 1, least=0),
            stop=stop_of(words),
            template=Path(template) if template is not None else None,
            beside=Path(beside) if beside is not None else None,
            serve=words.whole("serve", 0, least=0, most=65535) if words.text("serve") else None,
            graphs=words.choice("graph", ("auto", "none")) == "auto",
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """A model that is to answer, checked before its weights are read."""

    name: str  # as typed
    source: WeightSource
    run: Run
    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop: list[str]
    ends: frozenset[int]

    @classmethod
    def at(cls, path: Path, request: ChatRequest, launch: Launch) -> Chosen:
        """Find a model. Raises ConfigError."""
        source = weights_at(path)
        run = saved_run(source.config, request.words.overrides, launch.world_size)
        if run.world_size > 1:
            rule = "a conversation has one process"
            advice = "leave out keys of parallel; generate takes any layout"
            raise ConfigError("parallel.world_size", run.world_size, rule, 1, advice=advice)
        tokenizer = check_tokenizer(run, source.manifest)
        texts = source.texts
        if run.data.tokenizer != BYTES:
            own = tokenizer_file(run.data.tokenizer).parent
        else:
            own = texts if source.manifest is None else source.path.parent.parent
        if not (texts / SETTINGS).is_file():
            texts = own  # of a run that began without a model
        trained = own / TEMPLATE  # of a run on conversations
        chosen = request.template or (trained if trained.is_file() else None)
        template = ChatTemplate.of_file(chosen, texts) if chosen else ChatTemplate.find(texts)
        stop, ends = ends_of(request.stop, source.texts, tokenizer)
        if template is not None:
            if (turn := template.end_of_turn(tokenizer.special)) is not None:
                ends |= {tokenizer.special[turn]}
            elif after := template.after_answer():  # several tokens, which the model learnt to say
                stop = [*stop, after]
        if (note := changed_end(source.manifest, run.data.tokenizer, kept=False)) is not None:
            warn(note, "chat")
        return cls(
            str(path), source, run, tokenizer=tokenizer, template=template, stop=stop, ends=ends
        )

    @property
    def described(self) -> str:
        """Chat template, or what happens without one."""
        if self.template is not None:
            return f"chat template of {self.template.path}"
        return "no chat template: continues the text of all turns"


def check_sizes(chosen: Sequence[Chosen], device: torch.device) -> None:
    """Raise ConfigError if models and their KV caches do not fit together."""
    have = memory_of(chosen[0].run, device)
    for each in chosen:
        plan, context = Plan(each.run), each.run.train.seq_len
        sizes = DecodingSizes(sequences=1, prompt=0, new=context)
        try:
            check_decoding_length(each.run.model, sizes)
            check_decoding_memory(plan, sizes, have, gpu=device.type == "cuda")
        except ConfigError as error:
            raise ConfigError(
                "train.seq_len", context, error.rule, error.nearest, advice=error.advice
            ) from error
        takes = decoding_memory(plan, 0, 1, tokens=context)
        have -= takes.weights + takes.keys_values


@contextmanager
def speakers_of(
    chosen: Sequence[Chosen], request: ChatRequest, launch: Launch
) -> Iterator[list[Speaker]]:
    """Load the models, for the length of the block."""
    first, *others = chosen
    with loaded_model(first.source, first.run, launch) as model, ExitStack() as recorders:
        models = [model]
        for each in others:
            plan = Plan(each.run)
            groups = create_groups(plan.layout, 0)
            models.append(TrainedModel.load(each.source, plan, groups, model.device))
            say(f"{each.source.path}: {models[-1].described}", sys.stderr)
        speakers = []
        for each, loaded in zip(chosen, models, strict=True):
            recorder = None
            if request.graphs and loaded.device.type == "cuda":
                recorder = CudaRecorder()
                recorders.callback(recorder.release)  # before the process groups that graphs hold
            decoder = Decoder(loaded, 1, each.run.train.seq_len, recorder)
            text = CachedText(decoder, each.tokenizer.vocab_size)
            speakers.append(
                Speaker(
                    each.name, text, each.tokenizer, each.template, ends=each.ends, stop=each.stop
                )
            )
            say(f"{each.source.path}: {each.described}", sys.stderr)
        yield speakers


def chat(arguments: Sequence[str], launch: Launch) -> int:
    """Talk; return the exit code."""
    request = ChatRequest.parse(arguments)
    paths = [request.words.source, *([] if request.beside is None else [request.beside])]
    chosen = [Chosen.at(path, request, launch) for path in paths]
    check_sizes(chosen, choose_device(chosen[0].run, launch.local_rank))
    with speakers_of(chosen, request, launch) as speakers:
        if request.serve is not None:
            device = speakers[0].text.decoder.model.device
            generator = torch.Generator(device).manual_seed(request.seed)
            defaults = Defaults(
                request.system, request.count, request.sampling, generator=generator
            )
            Server(request.serve, speakers, defaults).answer_all()
        Terminal(
            speakers, request.system, request.count, sampling=request.sampling, seed=request.seed
        ).talk()
    return 0


def main(arguments: Sequence[str], parent: int) -> int:
    """Run the command line of this process, started by process `parent`; return the exit code."""
    return run_program("chat", HELP, arguments, parent=parent, work=chat)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.getppid()))
