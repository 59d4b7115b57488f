"""Throughput of Graphfold and a baseline on the same GPUs in the same call.

    python bench/compare.py --baseline SCRIPT --model smallmoe --graphs none,partial,full_iteration
    --json OUT [overrides …]

docs/benchmarks.md lists the settings that are equal in both. Every setting runs in fresh processes,
Graphfold's and the baseline's in turn, `--rounds` times in all; overrides and the environment of
bench/throughput.py apply to Graphfold only. torchrun starts SCRIPT with `--model`, `--mbs`,
`--gbs`, `--seq`, `--iters`, `--skip`, `--graph`, `--balance` and the degrees of parallelism, with
--fp8 also `--fp8` and the baseline's name of the recipe. SCRIPT ends by printing one line of JSON:
`step_ms`, `tok_s_gpu`, `tflops_gpu`, `alloc_gib`, `reserved_gib`, `loss`. Prints one table, which
compares each row of Graphfold with the baseline's fastest at the same precision. A failed run is a
row with its reason, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from processes import figures, start_and_wait, why

from app.cli.options.compose import load_overrides
from app.cli.options.messages import readable_errors
from app.config import Run
from app.plan.cost.flops import flops_per_token

BENCH = Path(__file__).resolve().parent
MODELS = {  # the baseline's name of a model -> our overrides
    "small": ("+experiment=small",),
    "smallmoe": ("+experiment=smallmoe",),
    "dense": ("+experiment=small", "model=llama3_8b"),
    "moe": ("+experiment=smallmoe", "model=qwen3_30b_a3b", "model.moe.aux_loss_coeff=0.001"),
}
LIKE_BOTH = ("optim.decay=constant", "optim.warmup_steps=0", "optim.weight_decay=0.01")
# our option -> the baseline's
BASELINE_GRAPHS = {"none": "none", "attn": "attn", "partial": "partial", "full_iteration": "full"}
# our FP8 recipe -> the baseline's
BASELINE_RECIPES = {"current": "tensorwise", "delayed": "delayed", "block": "blockwise"}
# grouped GEMMs of Transformer Engine in one kernel, its fastest; the environment may override it
BASELINE_ENV = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
# beginnings of what is recorded
ENV = ("CUDA_", "CUBLAS", "CUDNN", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_")
COLUMNS = (
    "who",
    "model",
    "setting",
    "step ms",
    "rounds",
    "tokens/s",
    "TFLOP/s",
    "x baseline",
    "alloc GiB",
    "reserved GiB",
    "load",
    "loss",
    "graphs",
    "pool GiB",
    "capture s",
)

LEFT = 3  # columns of text, the others are of numbers


@dataclass(frozen=True, slots=True)
class Round:
    """What one process, or one per GPU, measured."""

    step_ms: float = 0.0  # median
    tokens_per_s: float = 0.0  # all GPUs together
    alloc_gib: float | None = None  # peak of tensors, largest over ranks
    reserved_gib: float | None = None  # peak of the allocator, largest over ranks
    load: float | None = None  # max/mean tokens per expert, mean over layers
    loss: float | None = None  # last one, nats per token
    graphs: int | None = None  # captured, largest over ranks
    pool_gib: float | None = None  # memory of theirs
    capture_s: float | None = None
    error: str | None = None  # why there is nothing else
    details: dict[str, Any] = field(default_factory=dict)  # all that was said


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    who: str  # ours or baseline
    model: str
    graph: str  # as its own side calls it
    balanced: bool  # experts get the same number of tokens
    command: tuple[str, ...]
    env: Mapping[str, str]
    recipe: str = ""  # of products in FP8, as we call it; none: there are no such
    rounds: list[Round] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        """Of the first round that failed."""
        return next((found.error for found in self.rounds if found.error), None)

    def median(self, name: str) -> float | None:
        """Of a field over the rounds; None where it was not measured."""
        values = [getattr(found, name) for found in self.rounds]
        return None if None in values or self.error else statistics.median(values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything in turn, print the table."""
    args, overrides = read_arguments(arguments)
    with readable_errors("compare.py", speak=True):
        run = composed(args, overrides)
    settings = list(all_settings(args, overrides))
    for number in range(args.rounds):
        for setting in settings:
            setting.rounds.append(measure(setting, run, args.timeout))
            said = setting.rounds[-1].error or f"{setting.rounds[-1].step_ms:.1f} ms"
            print(
                f"round {number + 1}: {setting.who} {setting.model} {label(setting)}: {said}",
                file=sys.stderr,
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps(record(settings, run), indent=1) + "\n")
    tflop = flops_per_token(run.model, run.train.seq_len) / 1e12
    print(table(rows(settings, tflop / args.gpus)))
    return int(any(setting.error for setting in settings))


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The choices of a call, and our overrides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", type=Path, required=True, help="the baseline's script")
    parser.add_argument("--model", choices=MODELS, default="smallmoe")
    parser.add_argument("--layers", type=int, help="fewer of them, on both sides")
    parser.add_argument("--graphs", default="none", help="our options of cuda_graph, by commas")
    parser.add_argument(
        "--baseline-graphs",
        help="the baseline's values of --graph (default: those that match --graphs)",
    )
    parser.add_argument(
        "--force-balance",
        action="store_true",
        help="all settings once more with tokens dealt to the experts",
    )
    parser.add_argument(
        "--fp8", default="", help="all settings once more with these recipes, by commas"
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--parallel",
        default="",
        help="degrees for both sides: pp=2,vpp=2,ep=2; with tp say etp too",
    )
    parser.add_argument("--seq", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--mbs", type=int, default=2, help="sequences per microbatch")
    parser.add_argument("--gbs", type=int, default=8, help="sequences per step")
    parser.add_argument("--steps", type=int, default=20, help="of every run")
    parser.add_argument("--skip", type=int, default=10, help="first ones that are not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds after which a run has failed"
    )
    parser.add_argument("--json", type=Path, help="everything measured, written after every run")
    return parser.parse_known_args(arguments)


def degrees(args: argparse.Namespace) -> list[list[str]]:
    """[name, value] of every degree of parallelism that is given."""
    return [part.split("=", 1) for part in args.parallel.split(",") if part]


def ours(args: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Our overrides of all settings."""
    layers = [f"model.num_layers={args.layers}"] if args.layers else []
    sizes = (
        f"train.seq_len={args.seq}",
        f"train.micro_batch={args.mbs}",
        f"train.global_batch={args.gbs}",
    )
    return [
        *MODELS[args.model],
        *layers,
        *sizes,
        *(f"parallel.{name}={value}" for name, value in degrees(args)),
        *overrides,
    ]


def theirs(args: argparse.Namespace) -> list[str]:
    """The baseline's arguments of all settings."""
    values = {
        "model": args.model,
        "layers": args.layers,
        "seq": args.seq,
        "mbs": args.mbs,
        "gbs": args.gbs,
    }
    values |= dict(degrees(args)) | {"iters": args.steps, "skip": args.skip}
    return [
        text
        for name, value in values.items()
        if value is not None
        for text in (f"--{name}", str(value))
    ]


def composed(args: argparse.Namespace, overrides: Sequence[str]) -> Run:
    """Our run in the first graph mode, of which overrides may set more. Raises ConfigError."""
    graph = args.graphs.partition(",")[0]
    chosen = (*ours(args, overrides), *LIKE_BOTH, f"cuda_graph={graph}")
    return load_overrides(chosen, args.gpus)


def launcher(gpus: int) -> tuple[str, ...]:
    """torchrun of this interpreter."""
    return sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"


def all_settings(args: argparse.Namespace, overrides: Sequence[str]) -> Iterator[Setting]:
    """Ours and the baseline's in turn."""
    own = args.graphs.split(",")
    baseline = (
        args.baseline_graphs.split(",")
        if args.baseline_graphs
        else [BASELINE_GRAPHS[graph] for graph in own if graph in BASELINE_GRAPHS]
    )
    start = launcher(args.gpus)
    worker = (
        *start,
        str(BENCH / "throughput.py"),
        "ours",
        f"--steps={args.steps}",
        f"--skip={args.skip}",
    )
    baseline_env = {name: os.environ.get(name, value) for name, value in BASELINE_ENV.items()}
    if int(dict(degrees(args)).get("tp", 1)) > 1:
        baseline_env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    own_env = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(BENCH.parent), os.environ.get("PYTHONPATH")))
        )
    }
    recipes = ["", *filter(None, args.fp8.split(","))]
    for balanced, recipe in product((False, True) if args.force_balance else (False,), recipes):
        even = ("model.moe.force_balance=true",) if balanced else ()
        narrow = (f"precision.fp8.recipe={recipe}",) if recipe else ()
        for place in range(max(len(own), len(baseline))):
            for graph in own[place : place + 1]:
                chosen = (*ours(args, overrides), *LIKE_BOTH, f"cuda_graph={graph}", *even, *narrow)
                yield Setting(
                    "ours",
                    args.model,
                    graph,
                    balanced=balanced,
                    command=(*worker, *chosen),
                    env=own_env,
                    recipe=recipe,
                )
            for graph in baseline[place : place + 1]:
                chosen = (
                    *theirs(args),
                    "--graph",
                    graph,
                    *(("--balance", "1") if balanced else ()),
                    *(("--fp8", BASELINE_RECIPES[recipe]) if recipe else ()),
                )
                yield Setting(
                    "baseline",
                    args.model,
                    graph,
                    balanced=balanced,
                    command=(*start, str(args.baseline), *chosen),
                    env=baseline_env,
                    recipe=recipe,
                )


def measure(setting: Setting, run: Run, timeout: float) -> Round:
    """One run in fresh processes; never raises for what goes wrong in there."""
    with tempfile.TemporaryDirectory() as folder:
        out = ("--out", folder) if setting.who == "ours" else ()
        code, stdout, stderr = start_and_wait((*setting.command, *out), setting.env, timeout)
        if code:
            return Round(error=why(stderr, code), details={"stderr": stderr[-4000:]})
        try:
            return (
                our_round(Path(folder, "ours.json").read_text())
                if out
                else baseline_round(stdout, run)
            )
        except (ValueError, LookupError, OSError) as error:
            return Round(
                error=f"no figures: {type(error).__name__}: {error}",
                details={"stdout": stdout[-4000:]},
            )


def our_round(text: str) -> Round:
    """From the file of bench/throughput.py."""
    said = json.loads(text)
    return Round(
        said["step_ms"],
        said["tokens_per_s"],
        said.get("memory_peak_gib"),
        reserved_gib=said.get("memory_reserved_peak_gib"),
        load=said.get("moe_load_mean"),
        loss=said["last_loss"],
        graphs=said.get("graph_count"),
        pool_gib=said.get("graph_pool_gib"),
        capture_s=said.get("graph_capture_s"),
        details=said,
    )


def baseline_round(stdout: str, run: Run) -> Round:
    """From the baseline's line of JSON. ValueError where it counts other operations per token than
    we do.
    """
    said = figures(stdout)
    if not said:
        raise ValueError("no line of JSON with step_ms")
    per_token, ours = (
        said["tflops_gpu"] * 1e12 / said["tok_s_gpu"],
        flops_per_token(run.model, run.train.seq_len),
    )
    rounding = 0.05 / said["tflops_gpu"] + 0.5 / said["tok_s_gpu"]
    if abs(per_token / ours - 1) > 1e-3 + rounding:
        raise ValueError(
            f"the baseline counts {per_token:.4g} FLOPs per token, and Graphfold {ours:.4g}"
        )
    tokens = run.train.global_batch * run.train.seq_len / said["step_ms"] * 1e3
    return Round(
        said["step_ms"],
        tokens,
        said["alloc_gib"],
        reserved_gib=said["reserved_gib"],
        loss=said["loss"][-1],
        details=said,
    )


def label(setting: Setting) -> str:
    """What a setting is called in the table."""
    recipe = f", {setting.recipe}" if setting.recipe else ""
    return setting.graph + recipe + (", balanced" if setting.balanced else "")


def rows(settings: Sequence[Setting], tflop_per_gpu: float) -> Iterator[list[str]]:
    """Cells of the table; `tflop_per_gpu` operations per token count for both sides."""
    best: dict[tuple[bool, bool], float] = {}  # of the baseline: balanced, in FP8
    for setting in (each for each in settings if each.who == "baseline"):
        kind = setting.balanced, bool(setting.recipe)
        best[kind] = max(best.get(kind, 0), setting.median("tokens_per_s") or 0)
    for setting in settings:
        head = [setting.who, setting.model, label(setting)]
        if setting.error:
            failed = sum(found.error is not None for found in setting.rounds)
            yield [*head, f"{failed} of {len(setting.rounds)} failed: {setting.error}"]
            continue
        times, speed = (
            [found.step_ms for found in setting.rounds],
            setting.median("tokens_per_s") or 0,
        )
        of_peer = best.get((setting.balanced, bool(setting.recipe)))
        ratio = speed / of_peer if of_peer else None
        yield [
            *head,
            f"{statistics.median(times):.1f}",
            f"{min(times):.1f}-{max(times):.1f}",
            f"{speed:.0f}",
            f"{speed * tflop_per_gpu:.1f}",
            cell(ratio, 2),
            cell(setting.median("alloc_gib"), 1),
            cell(setting.median("reserved_gib"), 1),
            cell(setting.median("load"), 2),
            cell(setting.median("loss"), 4),
            cell(setting.median("graphs"), 0),
            cell(setting.median("pool_gib"), 1),
            cell(setting.median("capture_s"), 1),
        ]


def cell(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(body: Iterator[list[str]]) -> str:
    """Markdown with even columns; the fourth cell of a short row, why it failed, runs over the
    others.
    """
    lines = [list(COLUMNS), *body]
    full = [line for line in lines if len(line) == len(COLUMNS)]
    widths = [
        max(len(line[at]) for line in (lines if at < LEFT else full)) for at in range(len(COLUMNS))
    ]
    lines.insert(1, ["-" * width for width in widths])
    pads = [str.ljust] * LEFT + [str.rjust] * (len(COLUMNS) - LEFT)
    text = [
        " | ".join(pad(*both) for pad, *both in zip(pads, line, widths, strict=False))
        for line in lines
    ]
    return "\n".join(f"| {line} |" for line in text)


def record(settings: Sequence[Setting], run: Run) -> dict[str, Any]:
    """Everything, for the file."""
    return {
        "call": shlex.join(sys.argv),
        "versions": versions(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(ENV)
        },
        "flops_per_token": flops_per_token(run.model, run.train.seq_len),
        "settings": [
            asdict(setting) | {"command": shlex.join(setting.command)} for setting in settings
        ],
    }


def versions() -> dict[str, str | None]:
    """Of everything that counts; None where it is not installed. Asks the driver, so as to take
    no memory of a GPU.
    """
    found: dict[str, str | None] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
    }
    for name in ("transformer_engine", "megatron-core"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    found |= {"cuDNN": str(cudnn) if cudnn else None, "NCCL": None, "GPU": None, "driver": None}
    if torch.version.cuda:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if shutil.which("nvidia-smi"):
        ask = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        for line in subprocess.run(ask, capture_output=True, text=True).stdout.splitlines()[:1]:
            found["GPU"], found["driver"] = (part.strip() for part in line.split(",", 1))
    return found


if __name__ == "__main__":
    sys.exit(main())
