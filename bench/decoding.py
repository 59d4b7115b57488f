"""Tokens per second of decoding, beside `transformers`' generate with a static cache, in one call.

    python bench/decoding.py [--sequences 1] [--prompt 128] [--new 128] [--repeats 3] [override …]

The model is that of overrides of train.py (dense, or with experts as Qwen3's): the same sizes, with
random weights of each program's own, greedy. Times are whole calls, prompts and all new tokens;
median of the repeats, in turns, behind one call of each that warms up. Rows: with a cache (eager,
and on GPUs with a CUDA graph per step), without one as samples were drawn before, and theirs. On
GPUs theirs compiled too, behind all others: torch's compiler frees the cuBLAS workspaces that
graphs captured before it go on using.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from app.cli.options.compose import load_overrides
from app.config import ModelConfig, Run
from app.engine.build import build_engine
from app.engine.capture.recorder import CudaRecorder, Recorder
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.trained import without_gradients
from app.engine.ranks.dtypes import DTYPES
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.engine import Engine
from app.planner.plan import Plan

Call = Callable[[], object]


def cached(engine: Engine, prompts: torch.Tensor, new: int, recorder: Recorder | None) -> Call:
    """Greedy with a memory, which a first call has made and captured."""
    count, width = prompts.shape
    decoder = Decoder(engine, count, width + new, recorder)

    def call() -> None:
        with without_gradients(engine.device):
            logits_BV = decoder.prompts(prompts.tolist())
            for nth in range(new):
                drawn = logits_BV.argmax(-1).tolist()  # a program shows tokens as they come
                if nth + 1 < new:
                    logits_BV = decoder.step(drawn)

    return call


def whole(engine: Engine, prompts: torch.Tensor, new: int) -> Call:
    """Greedy with one forward of everything per token."""
    (chunk,) = engine.chunks

    @torch.no_grad()
    def call() -> None:
        tokens_BS = prompts
        for _ in range(new):
            place_1S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
            x_BSD = chunk(tokens_BS, chunk.context(place_1S, None)).x
            drawn_B1 = chunk.logits(x_BSD[:, -1:]).argmax(-1)
            tokens_BS = torch.cat((tokens_BS, drawn_B1), dim=1)

    return call


def theirs(hf: PreTrainedModel, prompts: torch.Tensor, new: int, compiled: bool) -> Call:
    """Greedy `generate` with a static cache."""
    return lambda: hf.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        cache_implementation="static",
        disable_compile=not compiled,
        pad_token_id=0,
    )


def their_model(model: ModelConfig) -> PreTrainedModel:
    """A model of `transformers` of the same sizes."""
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": 1 << 16,
        "eos_token_id": None,
    }
    if model.moe is None:
        return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=model.ffn_hidden_size))
    moe = model.moe
    config = Qwen3MoeConfig(
        **sizes,
        intermediate_size=model.ffn_hidden_size,
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.ffn_hidden_size,
    )
    return Qwen3MoeForCausalLM(config)


def rows(
    engine: Engine, prompts: torch.Tensor, given: argparse.Namespace, hf: PreTrainedModel
) -> Iterator[tuple[str, Call]]:
    """What is timed in turns, by name."""
    cuda = engine.device.type == "cuda"
    yield "cache", cached(engine, prompts, given.new, None)
    if cuda:
        yield "cache, graph", cached(engine, prompts, given.new, CudaRecorder())
    yield "whole forwards", whole(engine, prompts, given.new)
    yield "transformers", theirs(hf, prompts, given.new, compiled=False)


def without_losses(run: Run) -> Run:
    """Without those of routers, which only training looks at: neither program computes them."""
    if run.model.moe is None:
        return run
    moe = replace(run.model.moe, aux_loss_coeff=0.0, z_loss_coeff=0.0)
    return replace(run, model=replace(run.model, moe=moe))


def seconds(calls: Sequence[Call], repeats: int, cuda: bool) -> list[float]:
    """Median of the repeats of each, behind a call that warms up; they take turns, so that what
    else the machine does falls on all of them.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, taken in zip(calls, times, strict=True):
            since = time.perf_counter()
            call()
            if cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - since)
    return [statistics.median(taken[1:]) for taken in times]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    given, overrides = parser.parse_known_args()
    run = without_losses(load_overrides(overrides))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_stream(torch.cuda.Stream())
    with process_world(0, 1, device):
        plan = Plan(run)
        engine = build_engine(plan, create_groups(plan.layout, 0), device)
        shape = given.sequences, given.prompt
        prompts = torch.randint(0, run.model.vocab_size, shape, device=device)
        print(f"{run.model.name}, {run.precision.params.value}, {device.type}; "
              f"{given.sequences} of {given.prompt} tokens, {given.new} new")  # fmt: skip
        hf = their_model(run.model).to(device, DTYPES[run.precision.params]).eval()
        named = dict(rows(engine, prompts, given, hf))
        print_speeds(named, given, cuda)
        if cuda:
            named.clear()
            print_speeds(
                {"transformers, compiled": theirs(hf, prompts, given.new, compiled=True)},
                given,
                cuda,
            )


def print_speeds(named: dict[str, Call], given: argparse.Namespace, cuda: bool) -> None:
    """A line for each."""
    for name, took in zip(named, seconds([*named.values()], given.repeats, cuda), strict=True):
        print(f"{name:24}{given.sequences * given.new / took:10,.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
