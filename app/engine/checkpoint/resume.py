"""Which checkpoint a run continues from, and which settings may differ from the checkpoint's.

Every key of the configuration is either fixed or free. A run may change what it plans with, how it
computes and how it trains on; it may not become another model, or see other tokens than planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from app.config import ModelConfig, MoEConfig, Run
from app.config.renamed import with_new_names
from app.data.sources import (
    TOKENIZER_KEY,
    Record,
    difference,
    differing_option,
    read_otherwise,
    same_documents,
    same_tokenizer,
)
from app.engine.checkpoint.folder import CHECKPOINTS, MANIFEST, newest_checkpoint, parse_manifest
from app.engine.checkpoint.in_effect import unread
from app.engine.run.run_folder import CONFIG, RUNS, plain
from app.engine.run.signals import ctrl_c_held_back
from app.errors import ConfigError, FirstOf, nearest, typed
from app.hf.file_names import CONFIG_JSON

FIXED = frozenset((
    # Shapes of weights, and what is computed with them.
    "model.num_layers", "model.hidden_size", "model.ffn_hidden_size", "model.num_heads",
    "model.num_kv_heads", "model.head_dim", "model.vocab_size", "model.rope_theta",
    "model.norm_eps", "model.qk_norm", "model.qk_norm_whole", "model.qkv_bias",
    "model.tie_embeddings", "model.mla",
    "model.mla.q_lora_rank",
    "model.mla.kv_lora_rank", "model.mla.qk_nope_head_dim", "model.mla.qk_rope_head_dim",
    "model.mla.v_head_dim", "model.mla.norm_eps",
    "model.yarn", "model.yarn.factor", "model.yarn.original_length", "model.yarn.beta_fast",
    "model.yarn.beta_slow", "model.yarn.mscale",
    "model.yarn.mscale_all_dim", "model.llama3_rope", "model.llama3_rope.factor",
    "model.llama3_rope.original_length", "model.llama3_rope.low_turns",
    "model.llama3_rope.high_turns", "model.moe", "model.moe.num_experts",
    "model.moe.ffn_hidden_size", "model.moe.every_n", "model.moe.first_k_dense",
    "model.moe.shared_ffn_hidden_size", "model.moe.shared_gate",
    # Which experts compute a token, and with what weight.
    "model.moe.top_k", "model.moe.score", "model.moe.pre_softmax", "model.moe.groups",
    "model.moe.topk_groups", "model.moe.group_best", "model.moe.routed_scale",
    "model.moe.norm_topk_prob",
    "model.moe.capacity_factor", "model.moe.drop_policy", "model.moe.force_balance",
    # What values and sums are rounded to.
    "precision.params", "precision.grads",
    # Documents, their split, their tokens, and what a token sees of them.
    "data.source", "data.path", "data.name", "data.config_name", "data.split", "data.streaming",
    "data.text_field", "data.tokenizer", "data.validation_fraction", "data.validation_documents",
    "data.document_mask",
    # How tokens are packed into sequences, and in what order these come.
    "train.seq_len", "train.seed",
))  # fmt: skip
FREE = frozenset((
    # Says nothing about training.
    "model.name", "run_dir", "resume",
    # Has been used before the first step.
    "model.init_std", "model.init_from",
    # Losses, noise and bias updates of training, as the learning rate; see also `_misfit`.
    "model.moe.aux_loss_coeff", "model.moe.balance", "model.moe.z_loss_coeff",
    "model.moe.jitter_eps", "model.moe.bias_update_rate", "loss.normalize",
    # Speed and memory: the same sums in another order at most.
    "model.moe.dispatcher", "model.moe.static.transport", "model.moe.static.capacity",
    "model.moe.static.factor", "model.moe.static.multiple", "model.moe.static.on_overflow",
    "model.moe.static.paged_buffer",
    "model.moe.echo.spares", "model.moe.echo.algorithm", "model.moe.echo.threshold",
    "model.moe.echo.check",
    "model.moe.shared_overlap", "model.moe.pad_to_capacity",
    "loss.chunk_tokens", "train.device", "train.deterministic",
    "train.attention_backend",
    # Plans only.
    "model.moe.planned_imbalance",
    # Keeps small gradients from vanishing, and is divided out again.
    "precision.loss_scale", "precision.initial_loss_scale", "precision.min_loss_scale",
    "precision.loss_scale_window", "precision.loss_scale_hysteresis",
    # How the same documents are prepared, and where that is kept.
    "data.num_proc", "data.cache_dir", "data.accept_changed", "data.on_bad_file",
    # How long and in what batches training goes on; positions in the data are in sequences.
    "train.steps", "train.global_batch", "train.micro_batch",
    # Validation, the sample, and what follows steps that are not finite.
    "train.eval_interval", "train.eval_sequences", "train.sample_tokens", "train.on_bad_step",
    "train.max_bad_steps", "train.max_rollbacks",
))  # fmt: skip
# Where, how fast and in how many bits the same is computed, how it is updated, and what is written.
FREE_SECTIONS = ("parallel.", "hardware.", "schedule.", "recompute.", "cuda_graph.", "optim.",
                 "precision.fp8.", "checkpoint.", "log.")  # fmt: skip
# Whose keys are decided one by one: every configuration has them.
SECTIONS = frozenset(key.partition(".")[0] for key in FIXED | FREE if "." in key)
# Where data lie. Fixed where a checkpoint does not say what they held; otherwise contents count.
PLACES = ("data.path", "data.name", "data.tokenizer")
# Where the run is started from, and how many processes follow from the rest of `parallel`.
UNREPORTED = ("run_dir", "resume", "parallel.world_size", "data.accept_changed")
READ_OTHERWISE = (
    "read exactly as written now; the program that saved the checkpoint rewrote texts of JSON that "
    "look like times and kept byte order marks, so that other tokens may follow"
)
Difference = tuple[str, Any, Any]  # dotted key, saved value, current value


def is_fixed(key: str) -> bool:
    """Whether a run that continues must have the checkpoint's value of a key."""
    fixed = key in FIXED
    free = key in FREE or f"{key}.".startswith(FREE_SECTIONS)
    assert fixed != free, f"{key} is to be either fixed or free for a run that continues"
    return fixed


def allowed_changes(
    checkpoint: Path, manifest: dict[str, Any], run: Run, record: Callable[[], Record]
) -> tuple[str, ...]:
    """Settings and data that differ from those of the checkpoint with this manifest, as text.

    `record` tells what the data are now. Raises ConfigError for a difference by which the
    checkpoint cannot be continued.
    """
    data = _DataThen(manifest.get("data"), run, record)
    saved, current = manifest["config"], plain(asdict(run))
    differences = list(_differences(_with_replicas(saved), _with_replicas(current)))
    misfit = _misfit(differences, data)
    if misfit is not None:
        key, was, now = misfit
        rule = f"the checkpoint {checkpoint} was trained with {typed(was)}"
        advice = None
        if not is_fixed(key):
            rule += ", and 0 would leave out the biases that its routers have learnt"
        elif key in PLACES and data.change() is not None:
            rule += f", which held other data: {data.change()}"
            advice = "otherwise data.accept_changed=true"
        raise ConfigError(key, now, rule, nearest=FirstOf([was]), advice=advice)
    data.check(checkpoint)
    idle = set(unread(saved)) & set(unread(current))
    quiet = (*UNREPORTED, *idle)
    told = (each for each in differences if not each[0].startswith(quiet))
    changes = tuple(f"{key}: {was} -> {now}" for key, was, now in told)
    return (*changes, *data.told())


def _with_replicas(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that says how many data-parallel replicas follow from the number of
    processes, where it leaves that open.
    """
    parallel = config.get("parallel")
    if not isinstance(parallel, dict) or parallel.get("dp") is not None:
        return config
    sizes = (parallel.get(name) for name in ("world_size", "tp", "cp", "pp"))
    processes, *degrees = (size if isinstance(size, int) else 1 for size in sizes)
    replicas = max(1, processes // prod(degrees))
    return config | {"parallel": parallel | {"dp": replicas}}


@dataclass(frozen=True, slots=True)
class _DataThen:
    """The data of a checkpoint, beside those that a run has now."""

    saved: Record | None  # None: the checkpoint does not say
    run: Run
    now: Callable[[], Record]

    def change(self) -> str | None:
        """How they differ, as text; None: they are equal, or cannot be compared."""
        return difference(self.saved, self.now()) if self.saved else None

    def told(self) -> tuple[str, ...]:
        """What the start says of them."""
        if (change := self.change()) is not None:
            return (f"data: {change}",)
        if self.saved and read_otherwise(self.saved, self.now()):
            return (f"data: {READ_OTHERWISE}",)
        return ()

    def fits(self, key: str) -> bool:
        """Whether a run may continue with what lies elsewhere, as a key of PLACES says."""
        if not self.saved:
            return False
        if self.run.data.accept_changed:
            return True
        same = same_tokenizer if key == TOKENIZER_KEY else same_documents
        return same(self.saved, self.now())

    def check(self, checkpoint: Path) -> None:
        """Raise ConfigError for data that have changed and are not accepted."""
        change = self.change()
        config = self.run.data
        if self.saved is None or change is None:
            return
        if config.accept_changed and config.streaming:
            rule = f"a position in a stream means nothing in other data ({change})"
            raise ConfigError("data.accept_changed", True, rule, advice="bring the data back")
        if not config.accept_changed:
            rule = f"the data have changed since {checkpoint} was saved: {change}"
            advice = "bring them back, or go on with data.accept_changed=true"
            raise ConfigError(
                *differing_option(config, self.saved, self.now()), rule, advice=advice
            )


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> Iterator[Difference]:
    """Keys that differ. One that a section of the checkpoint does not know yet had what is its
    default now.
    """
    usual = plain(asdict(Run(ModelConfig(moe=MoEConfig()))))
    known = ("model",) if saved.keys() == {"model"} else current  # imported: no run has had it yet
    for name in known:
        yield from _unlike(name, saved.get(name), current[name], usual.get(name))


def _unlike(key: str, saved: Any, current: Any, usual: Any) -> Iterator[Difference]:
    if not (isinstance(saved, dict) and isinstance(current, dict)):
        if saved != current:
            yield key, saved, current
        return
    known = usual if isinstance(usual, dict) else {}
    for name, value in current.items():
        was = saved[name] if name in saved else known.get(name)
        yield from _unlike(f"{key}.{name}", was, value, known.get(name))


def _misfit(differences: Iterable[Difference], data: _DataThen) -> Difference | None:
    """The first difference by which a run cannot be continued, None where it can."""
    for key, was, now in differences:
        if key in PLACES and data.fits(key):
            continue
        # With a rate of 0 a router would leave out of its choice the biases that it has learnt.
        drops_biases = key == "model.moe.bias_update_rate" and was and not now
        if is_fixed(key) or drops_biases:
            return key, was, now
    return None


def checkpoint_to_resume(run: Run, record: Callable[[], Record]) -> tuple[Path | None, str | None]:
    """The checkpoint that `resume` asks for (None: start anew), and what was passed over as text.

    `record` tells what the data are now. Without a run_dir, resume=auto looks through all runs, and
    passes over newer checkpoints that this configuration cannot continue. Writes nothing. Raises
    ConfigError for a path without a checkpoint.
    """
    if run.resume is None:
        return None, None
    if run.resume != "auto":
        return checkpoint_at(Path(run.resume), "resume"), None
    if run.run_dir:
        return newest_checkpoint(Path(run.run_dir)), None
    return _newest_that_fits(run, record)


def checkpoint_at(path: Path, key: str) -> Path:
    """The checkpoint that a path names: itself, or the newest of a run. Raises ConfigError, about
    this key.
    """
    try:
        exists = (path / MANIFEST).exists() or path.exists()
    except OSError as error:
        raise ConfigError(key, path, f"cannot be read: {error.strerror}") from error
    if path.name.startswith("step-") and path.is_dir():
        return path
    newest = newest_checkpoint(path.parent if path.name == CHECKPOINTS else path)
    if newest is None:
        known = sorted(str(folder) for folder in RUNS.glob("*") if newest_checkpoint(folder))
        beside = [str(each) for each in path.parent.glob("*") if holds_weights(each)]
        rule = "holds no complete checkpoint" if exists else "does not exist"
        if (path / CONFIG_JSON).is_file():
            rule = "is the folder of a Hugging Face model, and holds no checkpoint of ours"
        elif path.is_file():
            rule = "is a file, and a checkpoint is a folder"
            known = [str(path.parent)] if (path.parent / MANIFEST).exists() else known
        guess = nearest(str(path), [*beside, *known])
        last = f"the last run with a checkpoint is {known[-1]}" if known and not guess else None
        raise ConfigError(key, path, rule, guess=guess, advice=last)
    return newest


def holds_weights(folder: Path) -> bool:
    """Whether a folder is a checkpoint, or that of a run with one."""
    return (folder / MANIFEST).is_file() or newest_checkpoint(folder) is not None


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a run has recorded of its newest checkpoint."""

    checkpoint: Path
    time: float  # of saving, seconds since 1970
    config: dict[str, Any] | None  # None: cannot be read
    data: Record | None = None  # None: not recorded


def _newest_that_fits(run: Run, record: Callable[[], Record]) -> tuple[Path | None, str | None]:
    """Of every run's newest checkpoint, the one saved last that this configuration can continue.

    Also the newest that was passed over, and why. A broken one is taken where its run's
    configuration fits or cannot be read: whoever loads it says what is wrong.
    """
    newest = [found for folder in RUNS.glob("*") if (found := newest_checkpoint(folder))]
    passed: list[tuple[Path, Difference]] = []
    current = plain(asdict(run))
    for saved in sorted(map(_recorded, newest), key=lambda saved: saved.time, reverse=True):
        data = _DataThen(saved.data, run, record)
        misfit = saved.config and _misfit(_differences(saved.config, current), data)
        if not misfit:
            return saved.checkpoint, _passed_over(passed)
        passed.append((saved.checkpoint, misfit))
    return None, _passed_over(passed)


def _recorded(checkpoint: Path) -> _Saved:
    try:
        manifest = parse_manifest(checkpoint)
    except ConfigError:
        config = _config_of(checkpoint.parent.parent)
        return _Saved(checkpoint, checkpoint.stat().st_mtime, config)
    # Older ones do not say when they were saved.
    time = manifest["time"] if "time" in manifest else checkpoint.stat().st_mtime
    return _Saved(checkpoint, time, manifest["config"], data=manifest.get("data"))


@ctrl_c_held_back()
def _config_of(run_dir: Path) -> Any | None:
    try:
        config = OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException):
        return None
    if not isinstance(config, dict):
        return None
    config, _ = with_new_names(config, saved=True)
    return config if all(isinstance(config.get(name), dict) for name in SECTIONS) else None


def _passed_over(passed: list[tuple[Path, Difference]]) -> str | None:
    if not passed:
        return None
    checkpoint, (key, *values) = passed[0]
    there, here = ("{…}" if isinstance(value, dict) else value for value in values)
    others = f"; and {len(passed) - 1} more" if len(passed) > 1 else ""
    return f"{checkpoint}: {key}={there} there, {here} here{others}"
