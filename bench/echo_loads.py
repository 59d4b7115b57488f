"""What clones of hot experts do to the loads of ranks, on a CPU: by algorithm and spares.

    python bench/echo_loads.py [--draws 20 --steps 300 --json bench/results/echo_loads.json.gz]

`synthetic`: experts' popularity by Zipf's law or from a Dirichlet distribution, 4096 tokens per
rank, 8 experts each. `trained`: models of `--experts` experts, 4 per token, trained here on the
standard library's text with a balancing loss and without; every layer and microbatch of held-out
text, its tokens split among virtual ranks. `simulated`: what a layer's forward and backward would
take by the costs given, which bench/clones.py and bench/step_profile.py measured on two H200s.
About four minutes on two cores.

Loads are those of the fullest rank over the mean of ranks: median, mean and worst over the draws.
The worst is also the capacity factor that suffices for static dispatch. `clones` are mean experts'
weights that move per layer, `out` mean and most that leave one rank.

Shapes: N cases, R ranks, E experts, T tokens, K experts per token.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from app.choices import CloneAlgorithm
from app.cli.options.compose import load_run, register_schema
from app.config import Run
from app.engine.build import build_engine
from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import FolderLock
from app.engine.ranks.groups import create_groups, process_world
from app.engine.run.trainer import Trainer
from app.engine.start.start import find_start, load_all_data
from app.moe.echo import plan_clones
from app.moe.phases import Router
from app.planner.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
TOKENS, TOP_K = 4096, 8
SKEWS = (
    *(("zipf", value) for value in (0.1, 0.2, 0.4, 0.7, 1.0)),
    *(("dirichlet", value) for value in (10.0, 3.0, 1.0, 0.3)),
)
WAYS = tuple(
    (algorithm, spares)
    for algorithm in CloneAlgorithm
    for spares in ((1,) if algorithm is CloneAlgorithm.approx_bin_packing else (1, 2, 4))
)
Json = dict[str, Any]


def main() -> None:
    """Draw, train, simulate; print and save."""
    args = parsed()
    torch.manual_seed(0)
    found: dict[str, list[Json]] = {"synthetic": synthetic(args.draws)}
    recorded = {
        coefficient: routed(args.experts, args.steps, coefficient, cache=args.cache)
        for coefficient in (0.01, 0.0)
    }
    found |= {"trained": trained(recorded, args.experts)}
    found |= {"assumed": [assumed(args)], "simulated": simulated(args, recorded)}
    args.json.write_bytes(gzip.compress(written(found).encode(), mtime=0))


def written(found: dict[str, list[Json]]) -> str:
    """JSON with a line to each row."""
    parts = []
    for name, rows in found.items():
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        parts.append(f'"{name}":[\n{lines}]')
    return "{" + ",\n".join(parts) + "}\n"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value, what in (
        ("draws", 20, "of each synthetic skew"),
        ("steps", 300, "of training"),
        ("experts", 64, "of the model that is trained"),
        ("width", 2048, "simulated: of the model"),
        ("ffn", 768, "simulated: of an expert"),
        ("tflops", 607, "simulated: of experts' matrix products, 10^12/s"),
        ("link", 362, "simulated: what leaves a GPU, GB/s"),
        ("plan-us", 113, "simulated: what clones cost a layer where none is made"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=what)
    cache = Path(tempfile.gettempdir()) / "graphfold_echo_loads"
    parser.add_argument("--cache", type=Path, default=cache, help="of the corpus")
    path = ROOT / "bench/results/echo_loads.json.gz"
    parser.add_argument("--json", type=Path, default=path, help="write there")
    return parser.parse_args()


def drawn(kind: str, value: float, ranks: int, experts: int) -> Tensor:
    """Counts [R, E] of one microbatch: no expert has a token twice."""
    if kind == "zipf":
        popular_E = torch.arange(1, experts + 1).double() ** -value
        popular_E = popular_E[torch.randperm(experts)]
    else:
        popular_E = torch._standard_gamma(torch.full((experts,), value, dtype=torch.float64))
    share_E = popular_E / popular_E.sum()
    for _ in range(20):
        share_E = share_E.clamp(max=1 / TOP_K)
        share_E = share_E / share_E.sum()
    chosen_RC = torch.multinomial(share_E.expand(ranks, -1), TOKENS * TOP_K, replacement=True)
    return torch.stack([chosen_C.bincount(minlength=experts) for chosen_C in chosen_RC])


def synthetic(draws: int) -> list[Json]:
    """One row per skew, ranks and experts."""
    rows = []
    for kind, value in SKEWS:
        for ranks in (2, 4, 8, 16):
            for experts in (64, 128, 256):
                cases = [drawn(kind, value, ranks, experts) for _ in range(draws)]
                size = {"skew": f"{kind} {value:g}", "ranks": ranks, "experts": experts}
                rows.append({**size, **summary(cases)})
                show(rows[-1])
    return rows


def show(row: Json) -> None:
    """Print means before and after."""
    means = {name: value["load"][1] for name, value in row["after"].items()}
    facts = [value for name, value in row.items() if name not in ("before", "after")]
    print(*facts, row["before"][1], means, flush=True)


def summary(cases: Iterable[Tensor], threshold: float = 0.0) -> Json:
    """Loads before, and loads and clones after, by each algorithm and number of spares."""
    cases = list(cases)
    after = {
        f"{label(algorithm)} {spares}": after_plans(cases, spares, algorithm, threshold=threshold)
        for algorithm, spares in WAYS
    }
    return {"before": spread(fullest(rank_loads(counts_RE)) for counts_RE in cases), "after": after}


def label(algorithm: CloneAlgorithm) -> str:
    """Return the name by which recorded results list an algorithm: `target_search` was `exact`."""
    return "exact" if algorithm is CloneAlgorithm.target_search else algorithm.value


def after_plans(
    cases: list[Tensor], spares: int, algorithm: CloneAlgorithm, threshold: float
) -> Json:
    """Of one algorithm with so many spares."""
    loads, clones, most_out = [], [], []
    for counts_RE in cases:
        moved_ES, _ = plan_clones(counts_RE, spares, algorithm, threshold)
        ranks = len(counts_RE)
        gone_R = moved_ES.sum(dim=1).view(ranks, -1).sum(dim=1)
        come_R = moved_ES.sum(dim=0).view(ranks, -1).sum(dim=1)
        loads.append(fullest(rank_loads(counts_RE) - gone_R + come_R))
        out_R = (moved_ES > 0).sum(dim=1).view(ranks, -1).sum(dim=1)
        clones.append(int(out_R.sum()))
        most_out.append(int(out_R.max()))
    out = [round(statistics.fmean(most_out), 2), max(most_out)]
    return {"load": spread(loads), "clones": round(statistics.fmean(clones), 2), "out": out}


def rank_loads(counts_RE: Tensor) -> Tensor:
    """Rows of each rank's own experts: [R]."""
    return counts_RE.sum(dim=0).view(len(counts_RE), -1).sum(dim=1)


def fullest(load_R: Tensor) -> float:
    """The largest load over the mean."""
    return float(load_R.max() * len(load_R) / load_R.sum().clamp(min=1))


def spread(values: Iterable[float]) -> list[float]:
    """Median, mean, worst."""
    values = list(values)
    found = statistics.median(values), statistics.fmean(values), max(values)
    return [round(value, 4) for value in found]


def trained(recorded: Mapping[float, list[Tensor]], experts: int) -> list[Json]:
    """One row per model and virtual ranks, over its layers and microbatches."""
    rows = []
    for coefficient, chosen in recorded.items():
        for ranks in (2, 4, 8):
            cases = [split(experts_TK, ranks, experts) for experts_TK in chosen]
            facts = {"aux_loss_coeff": coefficient, "ranks": ranks, "experts": experts}
            rows.append({**facts, "cases": len(cases), **summary(cases)})
            show(rows[-1])
    return rows


def split(experts_TK: Tensor, ranks: int, experts: int) -> Tensor:
    """Counts [R, E] of tokens that ranks share evenly."""
    parts = experts_TK.chunk(ranks)
    return torch.stack([part.flatten().bincount(minlength=experts) for part in parts])


def routed(experts: int, steps: int, coefficient: float, cache: Path) -> list[Tensor]:
    """Choices [T, K] of every layer and microbatch of held-out text, after training."""
    with tempfile.TemporaryDirectory() as folder, process_world(0, 1, torch.device("cpu")):
        settings = (f"run_dir={folder}/run", f"data.cache_dir={cache}")
        run = composed(experts, steps, coefficient, settings=settings)
        plan = Plan(run)
        groups = create_groups(plan.layout, 0)
        data = load_all_data(run, groups, 0)
        training = Trainer(build_engine(plan, groups, torch.device("cpu")), data, find_start(run))
        chosen: list[Tensor] = []

        def keep(_: nn.Module, __: object, found: tuple[Tensor, ...]) -> None:
            if not torch.is_grad_enabled():
                chosen.append(found[1].clone())

        for chunk in training.engine.chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    module.register_forward_hook(keep)
        with FolderLock() as lock:
            training.fit(Attempt(), lock)
    return chosen


def composed(experts: int, steps: int, coefficient: float, settings: tuple[str, ...]) -> Run:
    """A small model's run, validated once, at its end."""
    register_schema()
    overrides = [
        *(f"model.moe.num_experts={experts}", "model.moe.top_k=4"),
        *("model.moe.ffn_hidden_size=96", f"model.moe.aux_loss_coeff={coefficient}"),
        *(f"train.steps={steps}", f"train.eval_interval={steps}", "train.eval_sequences=256"),
        *("train.micro_batch=16", "train.global_batch=16", "train.sample_tokens=0"),
        *("train.device=cpu", "log=none", "checkpoint=none", f"optim.decay_steps={steps}"),
        *settings,
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return load_run(compose("train", overrides), 1)


def assumed(args: argparse.Namespace) -> Json:
    """Costs of the simulation, µs: what a thousand rows of the fullest rank take, forward and
    backward, in its experts (6 products of `width` × `ffn` per row and pass of three) and on its
    link (a row of bf16 in, out, and both gradients); a clone, whose three bf16 matrices leave a
    rank for forward and again for backward, and whose fp32 gradients return.
    """
    weights = 3 * args.width * args.ffn
    rows = 1000 * 3 * 2 * weights / args.tflops / 1e6
    wire = 1000 * 4 * 2 * args.width / args.link / 1e3
    clone = weights * (2 + 2 + 4) / args.link / 1e3
    costs = {"rows_us": round(rows, 1), "wire_us": round(wire, 1), "clone_us": round(clone, 1)}
    sizes = ("width", "ffn", "tflops", "link", "plan_us")
    return {**{name: getattr(args, name) for name in sizes}, **costs}


def simulated(
    args: argparse.Namespace, recorded: Mapping[float, list[Tensor]], experts: int = 128
) -> list[Json]:
    """µs of a layer by skew and ranks: even, without clones, and with them, by threshold.

    The rank with most clones out or in holds up the others; nothing overlaps. Of what was recorded
    the counts are multiplied, so that ranks have as many rows as the synthetic ones.
    """
    rows = []
    torch.manual_seed(1)
    for kind, value in SKEWS:
        for ranks in (2, 4, 8, 16):
            cases = [drawn(kind, value, ranks, experts) for _ in range(args.draws)]
            rows.append(simulated_row(f"{kind} {value:g}", cases, assumed(args)))
    for coefficient, chosen in recorded.items():
        for ranks in (2, 4, 8):
            cases = [split(experts_TK, ranks, args.experts) for experts_TK in chosen]
            wanted = ranks * TOKENS * TOP_K
            scaled = [counts_RE * (wanted // int(counts_RE.sum())) for counts_RE in cases]
            rows.append(simulated_row(f"learned {coefficient:g}", scaled, assumed(args)))
    return rows


def simulated_row(skew: str, cases: list[Tensor], costs: Json) -> Json:
    """Means over the cases."""
    even = TOKENS * TOP_K * (costs["rows_us"] + costs["wire_us"]) / 1000
    before = statistics.fmean(fullest(rank_loads(counts_RE)) for counts_RE in cases)
    row = {"skew": skew, "ranks": len(cases[0]), "before": round(before, 3)}
    row |= {"even": round(even), "without": round(before * even)}
    for spares, threshold in ((1, 0.0), (2, 0.0), (2, 0.05), (2, 0.1)):
        took = [
            layer_time(counts_RE, spares, threshold, even=even, costs=costs) for counts_RE in cases
        ]
        row[f"exact {spares}, threshold {threshold:g}"] = round(statistics.fmean(took))
    print(row, flush=True)
    return row


def layer_time(counts_RE: Tensor, spares: int, threshold: float, even: float, costs: Json) -> float:
    """µs with clones by `target_search`."""
    after = after_plans([counts_RE], spares, CloneAlgorithm.target_search, threshold=threshold)
    moved_ES, _ = plan_clones(counts_RE, spares, CloneAlgorithm.target_search, threshold)
    in_R = (moved_ES > 0).sum(dim=0).view(len(counts_RE), -1).sum(dim=1)
    copies = max(after["out"][1], int(in_R.max()))
    return after["load"][1] * even + copies * costs["clone_us"] + costs["plan_us"]


if __name__ == "__main__":
    main()
