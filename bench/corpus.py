"""Text of some files and a tokenizer made of it, in a folder small enough to be carried to a
machine without a network.

    python bench/corpus.py OUT 'books/**/*.md' [--every 5] [--at-least 20000] [--ids 50257]

Of the files that match, in the order of their names, those of `at_least` bytes and more count, and
every `every`-th of these is copied, as OUT/texts/0000.txt and so on. OUT/tokenizer.json is a BPE of
bytes with `ids` ids, the end of a document among them. A run reads both with `data=text
data.path='OUT/texts/*.txt' data.tokenizer=OUT/tokenizer.json`.
"""

from __future__ import annotations

import argparse
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from app.data.tokenizer import BYTES_END


def texts(pattern: str, at_least: int, every: int) -> Iterator[str]:
    """Those of the files that are taken."""
    paths = (Path(name) for name in sorted(glob.glob(pattern, recursive=True)))
    large = [path for path in paths if path.is_file() and path.stat().st_size >= at_least]
    for path in large[::every]:
        yield path.read_text(encoding="utf-8")


def tokenizer_of(corpus: Sequence[str], ids: int) -> Tokenizer:
    """A byte-level BPE (Sennrich et al., 2016; bytes as by GPT-2) of at most `ids` ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ids,
        special_tokens=[BYTES_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def main() -> None:
    """Write both, and say how much there is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("pattern")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--at-least", type=int, default=0)
    parser.add_argument("--ids", type=int, default=50257)
    given = parser.parse_args()
    corpus = [*texts(given.pattern, given.at_least, given.every)]
    if not corpus:
        parser.error(f"{given.pattern}: no file of {given.at_least} bytes or more")
    folder = given.out / "texts"
    folder.mkdir(parents=True)
    for number, text in enumerate(corpus):
        (folder / f"{number:04}.txt").write_text(text, encoding="utf-8")
    tokenizer = tokenizer_of(corpus, given.ids)
    tokenizer.save(str(given.out / "tokenizer.json"))
    tokens = sum(len(each.ids) for each in tokenizer.encode_batch(corpus))
    print(f"{len(corpus)} texts, {tokens} tokens of {tokenizer.get_vocab_size()} ids: {given.out}")


if __name__ == "__main__":
    main()
