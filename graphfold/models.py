"""Use a trained model: generate text, evaluate, export."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypedDict, Unpack, overload

if TYPE_CHECKING:
    from app.cli.options.request import Words
    from app.config import Run
    from app.data.tokenizer import Tokenizer
    from app.engine.decoding.trained import TrainedModel, WeightSource

PathLike = str | Path


class TextOptions(TypedDict, total=False):
    """Options of `Model.generate`: those of `graphfold-generate`, with its defaults."""

    max_new_tokens: int  # most tokens to generate: 200; fewer if the model's context ends before
    temperature: float  # 0.7; 0 always takes the likeliest token
    top_k: int | None  # sample from so many of the likeliest tokens; None from all
    top_p: float | None  # from the fewest tokens with this probability; None from all
    seed: int  # 1
    stop: str | Sequence[str]  # texts or special tokens before which a text ends
    batch: int  # prompts per forward pass: 16
    graph: str  # auto: capture decoding steps in a CUDA graph if possible; none


class Model:
    """A trained model on this process's device; `load` makes one. Closed by `close`, at the end of
    a `with` block, or with its last reference.
    """

    def __init__(
        self,
        source: WeightSource,
        run: Run,
        overrides: Sequence[str],
        *,
        tokenizer: Tokenizer,
        model: TrainedModel,
        close: Callable[[], None],
    ) -> None:
        self._source = source
        self._run = run
        self._overrides = overrides  # with which it was loaded
        self._tokenizer = tokenizer
        self._model: TrainedModel | None = model
        self._close = weakref.finalize(self, close)

    @property
    def path(self) -> Path:
        """The checkpoint, or the folder of a Hugging Face model."""
        return self._source.path

    @overload
    def generate(self, prompts: str, **options: Unpack[TextOptions]) -> str: ...
    @overload
    def generate(
        self, prompts: list[str] | tuple[str, ...], **options: Unpack[TextOptions]
    ) -> list[str]: ...
    def generate(
        self, prompts: str | list[str] | tuple[str, ...], **options: Unpack[TextOptions]
    ) -> str | list[str]:
        """Return the text after a prompt, or the texts after several.

        Options are those of `TextOptions`. Raises ConfigError.
        """
        from app.cli.generate import OWN, Request, Writer, WritingTask

        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"prompts are a text or several, not {prompts!r}")
        if unknown := options.keys() - TextOptions.__annotations__.keys():
            raise TypeError(f"generate has no option {', '.join(sorted(unknown))}")
        with self._opened() as model:
            request = Request.of(self._words({"prompt": texts, **options}, OWN))
            source, run, tokenizer = self._source, self._run, self._tokenizer
            task = WritingTask.of(request, source, run, tokenizer=tokenizer)
            task.check(model.device)
            found = Writer(model, task, aloud=False).write()
        return found[0] if isinstance(prompts, str) else found

    def evaluate(
        self,
        data: PathLike | Sequence[PathLike] | None = None,
        *,
        choices: PathLike | None = None,
        stride: int | None = None,
        batch: int = 8,
        overrides: Sequence[str] = (),
    ) -> dict[str, float]:
        """Return perplexity, loss (nats per token) and tokens of the documents in `data`, files or
        globs; or of a file of multiple-choice questions `choices` accuracy, normalised accuracy
        (loss per character) and questions.

        Documents longer than the context are cut into windows that start `stride` tokens apart,
        by default half the context; `batch` windows per forward pass. Overrides are of the data,
        such as data.source=jsonl. Raises ConfigError.
        """
        from app.cli.evaluate import OWN, Task, score
        from app.cli.options.given import given_data
        from app.engine.decoding.scoring import Accuracy

        options = {"choices": choices, "stride": stride, "batch": batch}
        with self._opened() as model:
            words = self._words(options, OWN, [*_data(data), *given_data(overrides)])
            found = score(model, Task.of(words, self._source, None))
        if isinstance(found, Accuracy):
            normalised = found.normalised
            return dict(accuracy=found.plain, normalised=normalised, questions=found.questions)
        return dict(perplexity=found.perplexity, loss=found.per_token, tokens=found.tokens)

    def export(self, folder: PathLike) -> Path:
        """Write the model of a run or checkpoint into a new folder in Hugging Face format, and
        return the folder. Raises ConfigError.
        """
        from app.cli.convert import export
        from app.cli.options.messages import mistakes_raised

        with mistakes_raised():
            export(self._source.path, Path(folder))
        return Path(folder)

    def close(self) -> None:
        """Free the model; calling it again changes nothing."""
        self._model = None
        self._close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return one line."""
        state = "closed" if self._model is None else self._model.described
        return f"<Model {self.path}: {state}>"

    @contextmanager
    def _opened(self) -> Iterator[TrainedModel]:
        """Yield the model with random numbers, device and gradients as its programs have them."""
        from app.cli.options.messages import mistakes_raised
        from app.cli.processes.environment import environment_kept
        from app.cli.start.use_model import for_inference

        if self._model is None:
            raise ValueError(f"{self!r} cannot be used any more")
        with mistakes_raised(), environment_kept(), for_inference(self._model):
            yield self._model

    def _words(
        self, options: Mapping[str, object], own: Sequence[str], overrides: Sequence[str] = ()
    ) -> Words:
        """Return the command line with these options. Raises ConfigError."""
        from app.cli.options.request import Words

        words = [
            f"{name}={value}"
            for name, given in options.items()
            for value in (given if isinstance(given, list | tuple) else [given])
            if value is not None
        ]
        return Words.parse([str(self.path), *words, *self._overrides, *overrides], own)


def _data(data: PathLike | Sequence[PathLike] | None) -> list[str]:
    """Return the override for these files."""
    from app.shell import quoted

    if data is None:
        return []
    paths = [data] if isinstance(data, str | Path) else list(data)
    return [f"data.path=[{','.join(quoted(path) for path in paths)}]"]


def load(source: PathLike, overrides: Sequence[str] = ()) -> Model:
    """Load a model: a run folder (its newest checkpoint), a checkpoint saved at any layout, or the
    folder of a Hugging Face model.

    Overrides such as train.device=cpu, precision.params=bfloat16, train.seq_len=N (context). One
    process. Raises ConfigError.
    """
    from app.cli.options.given import given
    from app.cli.options.messages import mistakes_raised
    from app.cli.options.request import Words
    from app.cli.options.saved import saved_run
    from app.cli.processes.environment import environment_kept
    from app.cli.start.hosted import own_launch
    from app.cli.start.kept import torch_kept

    with mistakes_raised(), environment_kept() as env:
        own_launch(env)  # before torch is loaded
        from app.cli.start.use_model import one_process, open_model
        from app.engine.decoding.trained import weights_at
        from app.engine.start.start import check_tokenizer

        words = Words.parse([str(source), *given(overrides)], ())
        weights = weights_at(words.source)
        run = one_process(saved_run(weights.config, words.overrides, None))
        tokenizer = check_tokenizer(run, weights.manifest)
        with torch_kept():
            model, close = open_model(weights, run)
    return Model(weights, run, words.overrides, tokenizer=tokenizer, model=model, close=close)
