"""Peak memory of preparing a corpus: `python bench/data_memory.py [checkout …]`.

Writes corpora of JSON lines whose documents have 1, 3 and 200 MB, made of the project's own pages,
prepares each in a process of its own with the tokenizer of bytes and with a BPE of 1,024 ids, and
prints the most memory that the process ever held, its time, and a sum of the tokens. Several
checkouts are measured one after the other on the same files.
"""

from __future__ import annotations

import glob
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPES = ((1, 300), (3, 300), (200, 2))  # MB of a document, documents
CHILD = """
import hashlib, resource, sys, time
from app.config import DataConfig
from app.choices import Source
from app.data.load import prepare
from app.data.prepared import map_tokens
from app.data.tokenizer import load_tokenizer
path, tokenizer, cache = sys.argv[1:]
began = time.monotonic()
config = DataConfig(source=Source.jsonl, path=(path,), tokenizer=tokenizer, cache_dir=cache)
folder = prepare(config, load_tokenizer(tokenizer))
took = time.monotonic() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
found = map_tokens(folder)
summed = hashlib.sha256()
for number, length in enumerate(found.lengths_D):
    summed.update(found.read(number, 0, int(length)))
print(f"{peak:6.2f} GiB {took:7.1f} s  {found.lengths_D.sum():13,} tokens {summed.hexdigest()[:8]}")
"""


def pages() -> list[str]:
    """Lines of the pages of this project."""
    files = sorted(glob.glob(str(Path(__file__).parent.parent / "docs/**/*.md"), recursive=True))
    return [line for file in files for line in Path(file).read_text().splitlines(keepends=True)]


def write_corpus(path: Path, megabytes: int, count: int) -> None:
    """JSON lines of `count` documents."""
    draw, lines = random.Random(megabytes), pages()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text: list[str] = []
            size = 0
            while size < megabytes * 10**6:
                text.append(draw.choice(lines))
                size += len(text[-1].encode())
            file.write(json.dumps({"text": "".join(text)}, ensure_ascii=False) + "\n")


def write_tokenizer(path: Path) -> None:
    """A BPE of bytes, trained on the pages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(pages(), trainer)
    tokenizer.save(str(path))


def main(checkouts: list[str]) -> None:
    """Measure every shape with both tokenizers in every checkout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder / "bpe.json")
        for megabytes, count in SHAPES:
            path = folder / f"{megabytes}.jsonl"
            write_corpus(path, megabytes, count)
            for checkout in checkouts:
                for tokenizer in ("bytes", str(folder / "bpe.json")):
                    cache = tempfile.mkdtemp(dir=folder)
                    line = [sys.executable, "-c", CHILD, str(path), tokenizer, cache]
                    env = {**os.environ, "PYTHONPATH": checkout, "PYTHONSAFEPATH": "1"}
                    done = subprocess.run(line, env=env, capture_output=True, text=True)
                    said = done.stdout.strip() or done.stderr.strip().splitlines()[-1:]
                    kind = Path(tokenizer).stem
                    print(f"{count:4} x {megabytes:3} MB {kind:5} {checkout}: {said}", flush=True)
            path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:] or [str(Path(__file__).parent.parent)])
