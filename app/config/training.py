"""Configuration of the optimizer, data, checkpoints, logging, loss and length of training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from app.choices import (
    AttentionBackendKind,
    BadFile,
    BadStep,
    Decay,
    Device,
    MomentDtype,
    MuonDtype,
    MuonTp,
    Normalize,
    OnCorruption,
    OptimizerKind,
    Packing,
    Source,
    Truncate,
    WandbMode,
    WsdDecay,
)
from app.config.bounds import above_zero, at_least, finite
from app.config.sources import SourceConfig, source_list
from app.errors import ConfigError, Instead, nearest_multiples, typed
from app.hashed import hashed_once

LENGTHS = ("steps", "tokens", "epochs")  # keys of TrainConfig of which one is given
USUAL_STEPS = 700
PROFILED = 3  # steps of a profile
BF16_CHANGE = 2**-7  # least 1 - beta of a moment in bf16
EXAMPLE = "give for example data.path='folder/*'"
# Most documents of a sequence by default: so many, or as many as there are with so many tokens.
USUAL_DOCUMENTS, SHORT_DOCUMENT = 16, 64


@dataclass(frozen=True)
class MuonConfig:
    """Muon on the matrices of linear layers and experts (optim.name=muon)."""

    momentum: float = 0.95  # decay of the momentum per step, which looks ahead (Nesterov)
    dtype: MuonDtype = MuonDtype.bf16  # element type of its GEMMs
    tp: MuonTp = MuonTp.gather  # what is orthogonalised of matrices divided over tp and etp

    def __post_init__(self) -> None:
        finite("optim.muon", self, "momentum")
        if not 0 <= self.momentum < 1:
            rule = "must be in [0, 1)"
            raise ConfigError("optim.muon.momentum", self.momentum, rule, nearest=0.95)


@hashed_once
@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019) or another optimizer, and its schedules.

    Steps are optimizer updates.
    """

    # optimizer of the matrices of linear layers and experts; AdamW updates all other parameters
    name: OptimizerKind = OptimizerKind.adamw
    lr: float = 3e-3  # peak learning rate
    min_lr: float = 3e-4  # learning rate after decay
    # steps in which the learning rate rises from 0 to lr; null: a twentieth of the decay steps
    warmup_steps: int | None = None
    decay: Decay = Decay.cosine  # shape after warm-up
    decay_steps: int | None = None  # step at which min_lr is reached; null: train.steps
    wsd_decay_steps: int | None = None  # length of the final decay, steps (decay=wsd)
    wsd_decay: WsdDecay = WsdDecay.exponential  # shape of the final decay
    moments: MomentDtype = MomentDtype.fp32  # element type of AdamW's moments
    beta1: float = 0.9  # decay of the first moment per step
    beta2: float = 0.95  # decay of the second moment per step
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # decoupled decay of matrices; vectors (norms, biases) have none
    clip_norm: float = 1.0  # largest global gradient norm; 0: no clipping
    # overlap the data-parallel reduction of gradients with the last backward of a step
    overlap_grads: bool = True
    # overlap the all-gather of updated parameters with what follows the update
    overlap_params: bool = True
    # parameters per bucket of reduce-scatter and all-gather; null: 40 million, or 1 million × dp
    bucket_numel: int | None = None
    muon: MuonConfig = field(default_factory=MuonConfig)  # of name=muon

    def __post_init__(self) -> None:
        self._check_muon()
        above_zero("optim", self, "lr", "eps")
        at_least("optim", self, 0, "min_lr", "weight_decay", "clip_norm", "warmup_steps")
        at_least("optim", self, 1, "decay_steps", "wsd_decay_steps")
        at_least("optim", self, 1, "bucket_numel")
        finite("optim", self, "beta1", "beta2")
        if self.min_lr > self.lr:
            rule = f"above the peak optim.lr={self.lr}"
            raise ConfigError("optim.min_lr", self.min_lr, rule, nearest=self.lr)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"optim.{name}", getattr(self, name), "must be in [0, 1)", nearest=0.95
                )
        self._check_moments()
        if self.decay is Decay.wsd and self.wsd_decay_steps is None:
            rule = "optim.decay=wsd needs the length of its last part"
            raise ConfigError(
                "optim.wsd_decay_steps",
                None,
                rule,
                advice="give a tenth of train.steps, for example",
            )

    def _check_moments(self) -> None:
        """Refuse averages that bf16 cannot hold: it rounds changes of up to 2^-8 of a value away,
        so that a moment would not shrink any more.
        """
        for name in ("beta1", "beta2") if self.moments is MomentDtype.bf16 else ():
            if 1 - getattr(self, name) < BF16_CHANGE:
                rule = "changes too little per step for optim.moments=bf16"
                near = (1 - BF16_CHANGE, Instead("optim.moments=fp32"))
                raise ConfigError(f"optim.{name}", getattr(self, name), rule, nearest=near)

    def _check_muon(self) -> None:
        """Refuse keys of Muon that nothing reads."""
        for each in fields(MuonConfig) if self.name is not OptimizerKind.muon else ():
            value = getattr(self.muon, each.name)
            if value != each.default:
                rule = f"is not read by optim.name={self.name.value}"
                near = (each.default, Instead("optim.name=muon"))
                raise ConfigError(f"optim.muon.{each.name}", value, rule, nearest=near)


def _kind_of(path: str) -> Source:
    """Return the data source that a file's extension suggests."""
    path = path.lower().removesuffix(".gz").removesuffix(".zst")
    if path.endswith((".jsonl", ".json", ".ndjson")):
        return Source.jsonl
    if path.endswith((".bin", ".idx")):
        return Source.megatron
    return Source.parquet if path.endswith(".parquet") else Source.text


@hashed_once
@dataclass(frozen=True)
class DataConfig:
    """Documents, their tokenization and their packing into sequences."""

    # several sources, a list of {path, source, weight, label, after_end, …}; a tuple once checked;
    # []: one, that of the other keys
    sources: Any = ()
    source: Source = Source.stdlib  # kind of corpus
    # a file or glob, or a list of them, for text, jsonl, parquet and megatron; a tuple once checked
    path: Any = ()
    name: str | None = None  # dataset name or local folder for source=hub, or chat without a path
    config_name: str | None = None  # the dataset's configuration
    split: str = "train"  # the dataset's split
    streaming: bool = False  # read while training instead of preparing an arrow cache first (hub)
    text_field: str = "text"  # column that holds the text
    # of source=chat: chatml, or a file in jinja; null: that of the tokenizer's folder, or of bytes
    chat_template: str | None = None
    # of conversations longer than train.seq_len, with packing=best_fit: right and left cut there
    truncate: Truncate = Truncate.right
    # skip leaves out files that cannot be read, skip_rows lines and rows of files
    on_bad_file: BadFile = BadFile.stop
    # "bytes", a `tokenizers` JSON file, its folder, a run, or a name on the Hugging Face hub
    tokenizer: str = "bytes"
    # validation documents of their own: a path, a list of paths, or a list of sources as in
    # data.sources; []: held out from the training documents
    validation: Any = ()
    validation_fraction: float = 0.1  # share of the documents kept for validation
    validation_documents: int = 100  # documents kept for validation when streaming
    document_mask: bool = False  # attention stays within a document, positions restart with it
    packing: Packing = Packing.stream  # best_fit cuts no document that fits into a sequence
    # most documents of a sequence with document_mask; further ones go into the next sequence, after
    # padding; null: a 64th of train.seq_len, at least 16
    max_documents: int | None = None
    num_proc: int = 1  # processes that tokenize while the cache is prepared
    cache_dir: str | None = None  # folder of the arrow cache; null: the datasets library's own
    accept_changed: bool = False  # resume from a checkpoint although the data have changed since

    def __post_init__(self) -> None:
        paths = (self.path,) if isinstance(self.path, str) else tuple(self.path or ())
        object.__setattr__(self, "path", paths)
        self._check_lists()
        if not all(isinstance(path, str) for path in paths):
            raise ConfigError(
                "data.path",
                list(paths),
                "must be a file or glob, or a list of them",
                advice=EXAMPLE,
            )
        at_least("data", self, 1, "num_proc", "validation_documents", "max_documents")
        if self.max_documents is not None and not self.document_mask:
            rule = "is read with data.document_mask=true, which keeps documents apart"
            near = ("null", Instead("data.document_mask=true"))
            raise ConfigError("data.max_documents", self.max_documents, rule, nearest=near)
        of_files = (Source.text, Source.jsonl, Source.parquet, Source.chat, Source.megatron)
        files = self.source in of_files and not self.of_hub
        if files and not self.path and not self.sources:
            raise ConfigError(
                "data.path", "", f"data={self.source.value} needs files or globs", advice=EXAMPLE
            )
        if self.path and not files:
            rule = f"is not read by data={self.source.value}, which is chosen or the default"
            instead = f"data={_kind_of(paths[-1]).value}"
            if self.source is Source.chat:
                rule, instead = "is not read beside data.name", "data.name=null"
            raise ConfigError("data.path", list(paths), rule, nearest=Instead(instead))
        self._check_unread()
        self._check_template()
        if self.source is Source.hub and not self.name and not self.sources:
            raise ConfigError(
                "data.name", self.name, "data=hub needs a dataset name or a local folder"
            )
        if self.streaming and not self.of_hub:
            rule = f"data={self.source.value} is prepared, not streamed"
            advice = "data.name can be" if self.source is Source.chat else "data=hub can be"
            raise ConfigError("data.streaming", True, rule, nearest=False, advice=advice)
        if self.on_bad_file is not BadFile.stop and self.of_hub:
            rule = f"data={self.source.value} reads files through the datasets library, "
            rule += "which ends at a bad one"
            raise ConfigError("data.on_bad_file", self.on_bad_file, rule, nearest="stop")
        finite("data", self, "validation_fraction")
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(
                "data.validation_fraction",
                self.validation_fraction,
                "must be between 0 and 1, both excluded",
                nearest=0.1,
            )

    def _check_unread(self) -> None:
        """Refuse keys of other kinds of documents, and a packing without what it needs."""
        if self.packing is Packing.best_fit:
            if not self.document_mask:
                rule = "pads sequences, which needs data.document_mask=true"
                near = ("stream", Instead("data.document_mask=true"))
                raise ConfigError("data.packing", self.packing, rule, nearest=near)
            if self.streaming:
                rule = "needs the lengths of all documents, which a stream does not know"
                near = ("stream", Instead("data.streaming=false"))
                raise ConfigError("data.packing", self.packing, rule, nearest=near)
        held = {
            Source.stdlib: "whole files",
            Source.text: "whole files",
            Source.megatron: "tokens",
            Source.chat: "conversations",
        }
        if self.text_field != "text" and self.source in held:
            rule = f"is not read by data={self.source.value}, whose documents are "
            rule += held[self.source]
            raise ConfigError("data.text_field", self.text_field, rule, nearest="text")

    def _check_template(self) -> None:
        """Refuse keys of conversations that nothing reads."""
        kinds = [self.source, *(each.source for each in (*self.sources, *self.validation))]
        if self.chat_template is not None and Source.chat not in kinds:
            rule = "is read by data=chat"
            near = ("null", Instead("data=chat"))
            raise ConfigError("data.chat_template", self.chat_template, rule, nearest=near)
        if self.truncate is Truncate.right:
            return
        if Source.chat not in kinds:
            rule, more = "is read by data=chat", Instead("data=chat")
        elif self.packing is not Packing.best_fit:
            rule = "data.packing=stream cuts conversations where a sequence is full"
            more = Instead("data.packing=best_fit")
        else:
            return
        raise ConfigError(
            "data.truncate", self.truncate, rule, nearest=(Truncate.right.value, more)
        )

    def _check_lists(self) -> None:
        """Type both lists of sources, and refuse keys of a single source beside several."""
        for name in ("sources", "validation"):
            listed = source_list(f"data.{name}", getattr(self, name))
            object.__setattr__(self, name, listed)
        _ = self.parts, self.validation_parts  # raise what is wrong with an entry
        for key, value in (("path", self.path), ("name", self.name)):
            if value and self.sources:
                rule = "is read without data.sources, whose entries have their own"
                near = Instead("data.sources=[]")
                raise ConfigError(f"data.{key}", value, rule, nearest=near)

    @property
    def of_hub(self) -> bool:
        """Whether the documents are a dataset that data.name names."""
        return self.source is Source.hub or (self.source is Source.chat and self.name is not None)

    @property
    def parts(self) -> tuple[tuple[SourceConfig, DataConfig], ...]:
        """Each of several sources, with the configuration of it alone. Raises ConfigError."""
        return tuple((each, self._alone("data.sources", each)) for each in self.sources)

    @property
    def validation_parts(self) -> tuple[tuple[SourceConfig, DataConfig], ...]:
        """The same of validation documents of their own."""
        return tuple((each, self._alone("data.validation", each)) for each in self.validation)

    def _alone(self, key: str, entry: SourceConfig) -> DataConfig:
        given = entry.given()
        if "source" not in given and given.get("path"):
            kind = _kind_of(given["path"][-1])
            of_rows = kind in (Source.jsonl, Source.parquet)
            given["source"] = Source.chat if self.source is Source.chat and of_rows else kind
        elif "source" not in given and given.get("name"):
            given["source"] = Source.chat if self.source is Source.chat else Source.hub
        own: dict[str, Any] = {"path": (), "name": None, "sources": (), "validation": ()}
        if given.get("source", self.source) is not Source.chat:
            own |= {"chat_template": None, "truncate": Truncate.right}
        if key == "data.validation":
            own["streaming"] = False  # the same documents in every validation
        try:
            return replace(self, **(own | given))
        except ConfigError as error:
            rule = f"{error.key}={typed(error.value)}: {error.rule}"
            raise ConfigError(key, entry.label, rule, advice=error.advice) from error

    def most_documents(self, seq_len: int) -> int | None:
        """Return the most documents of a sequence of so many tokens; None: they are not told apart.

        The usual number has room for documents of 64 tokens on average: attention kernels get that
        many documents per sequence, and find out on the device how many are empty.
        """
        if not self.document_mask:
            return None
        usual = max(USUAL_DOCUMENTS, seq_len // SHORT_DOCUMENT)
        return min(seq_len, self.max_documents or usual)


@hashed_once
@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: when they are saved, and how many are kept."""

    interval: int = 100  # steps between checkpoints; 0: none, not even at the end
    keep_last: int = 2  # newest checkpoints kept; older ones are removed
    # checkpoints at multiples of this step are never removed; null: none
    keep_every: int | None = None
    asynchronous: bool = True  # write in the background, from a copy in host memory
    # save the parameters of train.frozen too; false: a resumed run takes them from where its
    # initial weights came from, and nothing else can use the checkpoint
    frozen: bool = True
    # when the run ends, export the model to its folder in Hugging Face format
    export_hf: bool = False
    # finished steps that a rank's death costs at most: each rank's state is copied to its host's
    # memory and to another rank's, from which it is started again in place; null: no copies
    memory_every: int | None = None

    @property
    def memory_interval(self) -> int | None:
        """Steps between copies in memory. A copy may take that long, and until then a death goes
        back to the copy before it: over 2 · interval − 1 finished steps at most.
        """
        return None if self.memory_every is None else (self.memory_every + 1) // 2

    def __post_init__(self) -> None:
        at_least("checkpoint", self, 0, "interval")
        if self.export_hf and not self.interval:
            rule = (
                "is made from the checkpoint of the last step, and checkpoint.interval=0 saves none"
            )
            near = (False, Instead("checkpoint.interval=100"))
            raise ConfigError("checkpoint.export_hf", True, rule, nearest=near)
        at_least("checkpoint", self, 1, "keep_last", "keep_every", "memory_every")
        if self.interval and self.keep_every and self.keep_every % self.interval:
            rule = (
                f"must be a multiple of checkpoint.interval={self.interval}: no other steps "
                "are saved"
            )
            raise ConfigError(
                "checkpoint.keep_every",
                self.keep_every,
                rule,
                nearest=nearest_multiples(self.keep_every, self.interval),
            )


@hashed_once
@dataclass(frozen=True)
class LogConfig:
    """Reports: how often, and where besides metrics.jsonl."""

    interval: int = 10  # steps between report lines
    console: bool = True  # opening, live progress line and result; false: only the run folder
    # the opening also has layout, kernels, slow paths and versions; times of the start and capture
    verbose: bool = False
    wandb: bool = True  # a Weights & Biases run
    wandb_mode: WandbMode = WandbMode.auto  # where that run goes
    project: str = "graphfold"  # project of trackers, experiment of MLflow
    # group of runs in trackers; null: none, or the sweep's name for a job of a sweep
    group: str | None = None
    tensorboard: bool = False  # events for TensorBoard, in the run folder
    # an MLflow run, at MLFLOW_TRACKING_URI or in the folder mlflow beside the run folder
    mlflow: bool = False
    trackio: bool = False  # a Trackio run, in TRACKIO_DIR

    @property
    def tracked(self) -> bool:
        """Return whether any experiment tracker records the run."""
        return self.wandb or self.tensorboard or self.mlflow or self.trackio

    def __post_init__(self) -> None:
        at_least("log", self, 1, "interval")


@dataclass(frozen=True)
class LossConfig:
    """Cross-entropy over next tokens."""

    normalize: Normalize = Normalize.token  # divisor of the summed token losses
    # tokens per chunk of logits, which are recomputed in backward; null: all at once, saved
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        at_least("loss", self, 1, "chunk_tokens")


@hashed_once
@dataclass(frozen=True)
class TrainConfig:
    """Length and batch of the run."""

    # optimizer updates; null: as many as tokens or epochs make, or 700
    steps: int | None = None
    tokens: float | None = None  # tokens to train on, up to a full step; null: those of steps
    epochs: float | None = None  # passes over one source, likewise
    seq_len: int = 128  # tokens per sequence
    micro_batch: int = 8  # sequences per forward on one rank
    global_batch: int = 16  # sequences per optimizer update over all ranks
    # steps between validations; 0: only before the first step and after the last
    eval_interval: int = 100
    # sequences of one validation over all ranks; at least a microbatch each
    eval_sequences: int = 256
    # validations in a row without a lower loss after which the run ends; null: none end it
    stop_after_worse: int | None = None
    sample_tokens: int = 240  # tokens generated when the run ends; 0: none
    # reaction to a non-finite loss or gradient norm
    on_bad_step: BadStep = BadStep.skip
    max_bad_steps: int = 10  # consecutive such steps that end the run (on_bad_step=skip)
    # rollbacks of one process at most (on_bad_step=rollback)
    max_rollbacks: int = 3
    # steps between two checks, which also precede each checkpoint: microbatches are replayed by the
    # same rank and by another replica, and weights compared, bit for bit; null: none
    replay_every: int | None = None
    # reaction to a difference
    on_corruption: OnCorruption = OnCorruption.stop
    # parameters that are not trained: patterns of their names in checkpoints, such as embedding,
    # layers.0-3 or layers.*.attn.*; ! before one trains what it matches; the last match decides
    frozen: tuple[str, ...] = ()
    # first of three steps of a process that are profiled, into profile/ of the run folder; null:
    # none are
    profile: int | None = None
    seed: int = 1  # of initial weights and data order
    device: Device = Device.auto  # where the run computes
    # make equal runs repeat bit for bit; slower attention kernels on a GPU
    deterministic: bool = True
    # library that computes attention; auto: with train.deterministic=true Transformer Engine, where
    # it is installed and the memory for all scores suffices, else torch
    attention_backend: AttentionBackendKind = AttentionBackendKind.auto

    def __post_init__(self) -> None:
        object.__setattr__(self, "frozen", tuple(self.frozen))
        above_zero("train", self, "tokens", "epochs")
        at_least(
            "train", self, 1, "steps", "seq_len", "micro_batch", "global_batch", "eval_sequences"
        )
        at_least("train", self, 1, "max_bad_steps", "max_rollbacks", "stop_after_worse")
        at_least("train", self, 1, "profile", "replay_every")
        at_least("train", self, 0, "eval_interval", "sample_tokens", "seed")
        if self.stop_after_worse is not None and not self.eval_interval:
            rule = "counts validations, and train.eval_interval=0 has none between first and last"
            near = ("null", Instead("train.eval_interval=100"))
            raise ConfigError("train.stop_after_worse", self.stop_after_worse, rule, nearest=near)
        self._settle_length()

    def _settle_length(self) -> None:
        """Set `steps`, unless the data decide."""
        given = [key for key in LENGTHS if getattr(self, key) is not None]
        if len(given) > 1:
            key, other = given[1], given[0]
            rule = f"train.{other}={getattr(self, other):g} is given too"
            near = (Instead(f"train.{other}=null"), "null")
            raise ConfigError(f"train.{key}", getattr(self, key), rule, nearest=near)
        steps = USUAL_STEPS
        if self.tokens is not None:
            steps = math.ceil(self.tokens / (self.global_batch * self.seq_len))
        if given in ([], ["tokens"]):
            object.__setattr__(self, "steps", steps)
            object.__setattr__(self, "tokens", None)
