"""Seconds and host memory of Hugging Face models in and out: 1.8 B parameters in bf16, 64 experts.

    python bench/hugging_face.py [FOLDER]

Writes a random model (3.6 GB) and its checkpoint into FOLDER, or a temporary one, and measures:
a rank of eight reading its part, `convert from-hf`, `convert to-hf`. Memory is what a process holds
of its own (RssAnon, looked at every 5 ms) beyond what it began with; of the rank, beyond its part.
Prints a line each and writes bench/results/hugging_face.json; fails above 2 GiB, and where what
comes out is not what went in.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.config import ModelConfig, MoEConfig
from app.engine.export.export import export_checkpoint
from app.engine.export.imported import import_model
from app.engine.start.resume import checkpoint_at
from app.hf import write
from app.hf.families import family_of
from app.hf.file_names import CONFIG_JSON
from app.hf.pretrained import Pretrained
from app.hf.write import Export, as_json
from app.plan.model.stage import model_weights
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.reshard import Block

ROOT = Path(__file__).resolve().parent.parent
MODEL = ModelConfig(
    num_layers=16,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=50304,
    qk_norm=True,
    rope_theta=1e6,
    moe=MoEConfig(num_experts=64, top_k=6, ffn_hidden_size=528),
)
RANKS = 8  # that share the experts
FILE_BYTES = 10**9  # so that there are several, as of larger models
MOST = 2.0  # GiB
EVERY_S = 0.005
KEY = "bench"


class Noise:
    """Weights drawn at random, the same again for the same name."""

    def read(self, name: str, box: Block) -> Tensor:
        """A box of a weight."""
        generator = torch.Generator().manual_seed(len(name) + sum(box.start))
        return torch.randn(box.sizes, generator=generator) * 0.02


def own_memory() -> int:
    """Bytes of this process that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@contextmanager
def watched(found: dict[str, Any], beyond: int = 0) -> Iterator[None]:
    """Seconds of the block, and its peak of memory beyond what there was and `beyond`, in GiB."""
    before, over = own_memory() + beyond, threading.Event()
    peak = before

    def look() -> None:
        nonlocal peak
        while not over.wait(EVERY_S):
            peak = max(peak, own_memory())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    began = time.perf_counter()
    yield
    found["seconds"] = round(time.perf_counter() - began, 1)
    over.set()
    thread.join()
    found["gib"] = round((peak - before) / 2**30, 2)


def make(folder: Path) -> dict[str, Any]:
    """Write the random model."""
    export = Export(MODEL, family_of(MODEL, KEY, None), folder / "theirs", torch.bfloat16)
    export.begin()
    for name in export.files():
        export.write(name, Noise())
    config = export.family.written(MODEL)
    config |= {"max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    export.finish({CONFIG_JSON: as_json(config)})
    weights = sum(each.weight.numel for each in model_weights(MODEL))
    return {"parameters": weights}


def read_part(folder: Path) -> dict[str, Any]:
    """Fill the part that the first of the ranks holds."""
    coords, found = ShardCoords(ep=(0, RANKS)), dict[str, Any]()
    weights = list(model_weights(MODEL))
    parts = [torch.zeros(coords.shape(each.weight), dtype=torch.bfloat16) for each in weights]
    with watched(found):
        pretrained = Pretrained(folder / "theirs", KEY)
        pretrained.fill(zip(weights, parts, strict=True), coords)
    return {**found, "part_gib": round(sum(part.nbytes for part in parts) / 2**30, 2)}


def come_in(folder: Path) -> dict[str, Any]:
    """`convert from-hf`."""
    found = dict[str, Any]()
    with watched(found):
        import_model(folder / "theirs", "theirs", folder / "run", KEY)
    return found


def go_out(folder: Path) -> dict[str, Any]:
    """`convert to-hf`."""
    found = dict[str, Any]()
    with watched(found):
        export_checkpoint(checkpoint_at(folder / "run", KEY), folder / "out", KEY)
    return found


STEPS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a random model": make,
    f"a rank of {RANKS} reads its part": read_part,
    "convert from-hf": come_in,
    "convert to-hf": go_out,
}


def _in_process(work: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What `work` finds in a process of its own."""
    context = multiprocessing.get_context("fork")
    answers: SimpleQueue[dict[str, Any]] = context.SimpleQueue()
    process = context.Process(target=lambda: answers.put(work(folder)))
    process.start()
    process.join()
    assert process.exitcode == 0, "it says above why"
    return answers.get()


def digest(folder: Path) -> dict[str, str]:
    """Sums of the files with weights."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def measure(folder: Path) -> None:
    """Take the steps in order, and check what they have found."""
    write.FILE_BYTES = FILE_BYTES
    torch.set_num_threads(1)
    results = {}
    for name, work in STEPS.items():
        results[name] = _in_process(work, folder)
        print(f"{name}: {results[name]}", flush=True)
    (ROOT / "bench/results/hugging_face.json").write_text(json.dumps(results, indent=1) + "\n")
    assert all(each.get("gib", 0) <= MOST for each in results.values()), "too much memory"
    assert digest(folder / "theirs") == digest(folder / "out"), "something else came out"


def main() -> None:
    """In the folder named, or in a temporary one."""
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder))


if __name__ == "__main__":
    main()
