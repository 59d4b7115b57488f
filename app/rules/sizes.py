"""Upper bounds on the sizes of a run: planning larger ones, which are mistakes, takes minutes."""

from __future__ import annotations

from app.config import Run
from app.errors import ConfigError
from app.plan.select import select_stages

MOST_OF = {
    "model.num_layers": 2048,
    "model.hidden_size": 2**20,
    "model.ffn_hidden_size": 2**22,
    "model.num_heads": 2**16,
    "model.num_kv_heads": 2**16,
    "model.head_dim": 2**14,
    "model.vocab_size": 2**28,
    "model.mla.q_lora_rank": 2**20,
    "model.mla.kv_lora_rank": 2**20,
    "model.mla.qk_nope_head_dim": 2**14,
    "model.mla.qk_rope_head_dim": 2**14,
    "model.moe.num_experts": 2**16,
    "model.moe.ffn_hidden_size": 2**22,
    "model.moe.shared_ffn_hidden_size": 2**22,
    "train.seq_len": 2**30,
    "train.micro_batch": 2**20,
    "data.num_proc": 2**10,
}  # the elements of any weight then stay below 2**63, which torch counts in
MOST_RANKS = 2**18
MOST_FORWARDS = 2**14  # of a step, over all stages: twice those of 256 microbatches in 32 stages


def check_sizes(run: Run) -> None:
    """Refuse sizes that are larger than anybody trains."""
    for key, most in MOST_OF.items():
        section: object = run
        for name in key.split("."):
            section = getattr(section, name, None)
        if isinstance(section, int) and section > most:
            raise ConfigError(key, section, f"must be at most {most}", nearest=most)
    if run.world_size > MOST_RANKS:
        degrees = {
            axis: getattr(run.parallel, axis) or 1
            for axis in ("world_size", "dp", "tp", "cp", "pp")
        }
        axis = max(degrees, key=lambda axis: degrees[axis])
        rule = f"makes {run.world_size} ranks, of which there must be at most {MOST_RANKS}"
        most = MOST_RANKS * degrees[axis] // run.world_size
        raise ConfigError(f"parallel.{axis}", degrees[axis], rule, nearest=most or None)


def check_microbatches(run: Run) -> None:
    """Refuse more microbatches than a schedule can list in reasonable time."""
    stages = len(select_stages(run).in_order)
    per_step = run.train.micro_batch * run.dp
    for key, count in (
        ("global_batch", run.num_microbatches),
        ("eval_sequences", run.eval_microbatches),
    ):
        if count * stages <= MOST_FORWARDS:
            continue
        asked = getattr(run.train, key)
        most = max(1, MOST_FORWARDS // stages) * per_step
        passed = f"{count} microbatches" + (f" through {stages} stages" if stages > 1 else "")
        rule = (
            f"sequences make {passed} on each rank, of which there must be at most "
            f"{MOST_FORWARDS // stages}"
        )
        meant = asked // run.train.seq_len
        advice = f"{asked} tokens would be {meant} sequences" if 0 < meant <= most else None
        raise ConfigError(f"train.{key}", asked, rule, nearest=most, advice=advice)
