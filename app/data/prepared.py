"""The cache of prepared corpora: tokens in arrow files, a folder for each corpus.

    <cache>/graphfold/<key>/contents.json     sizes and sums of the others
    <cache>/graphfold/<key>/tokens.arrow      documents as lists of ids; num_proc > 1: several files

Of tokens that are used as they are, contents.json says that they have been checked.

The key covers contents, sizes and times of the sources, the tokenizer and what is read of them, so
that a changed file makes another entry. A folder is written under a hidden name and renamed when it
is complete; one that is not as `contents.json` says is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from app.choices import BadFile, Source
from app.config import DataConfig
from app.data.packing import Documents
from app.data.sources import Sources, check_unchanged, file_sum
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

FORMAT = 1  # of a folder, and of how documents become tokens
CONTENTS = "contents.json"
MOST_NAMED = 3  # files in a line about those that were left out


def prepare_tokens(
    config: DataConfig, tokenizer: Tokenizer, sources: Sources, *, say: Callable[[str], object]
) -> Path:
    """The folder with the tokens of a corpus, which is written unless it is there.

    A second process that wants the same waits for the first. `say` is called with a line when a
    folder is not whole and made anew. Raises ConfigError when the source cannot be read or holds no
    text, or the cache cannot be written.
    """
    folder = _cache(config) / _key(config, tokenizer, sources)
    if _fault(folder) is None:
        return folder
    try:
        with _alone(folder):
            if (fault := _fault(folder)) is not None:
                if folder.exists():
                    say(f"prepared again, since {folder} is not whole: {fault}")
                _write(config, tokenizer, sources, folder=folder)
    except OSError as error:
        reason = error.strerror or str(error)
        rule = f"cannot be written: {reason}"
        raise ConfigError(
            "data.cache_dir", folder.parent, rule, advice="choose another folder"
        ) from error
    return folder


def map_tokens(folder: Path) -> Documents:
    """The documents of a folder that `prepare_tokens` has returned, mapped into memory."""
    contents = _contents(folder)
    if "mapped" in contents:
        from app.data.megatron import map_pairs

        return map_pairs(contents["mapped"])
    names = contents["files"]
    tables = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
    chunks = [chunk for table in tables for chunk in table["ids"].chunks]
    return Documents.from_arrow(pa.chunked_array(chunks))


def check_ends(folder: Path, why: str) -> None:
    """Raise ConfigError for a document without the token that ends it; `why` says who needs it."""
    if (found := _contents(folder).get("open_end")) is not None:
        path, document = found
        rule = f"document {document} does not end with the end-of-document token of data.tokenizer"
        raise ConfigError("data.path", path, f"{rule}, as {why} needs")


def _contents(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
    return found


def left_out(folder: Path, sources: Sources) -> str | None:
    """Which files of a corpus data.on_bad_file=skip has left out, in a line; None: none."""
    found = [*sources.unreadable, *_contents(folder).get("left_out", ())]
    if not found:
        return None
    named = "; ".join(f"{path}: {fault}" for path, fault in found[:MOST_NAMED])
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    total = len(sources.files) + len(sources.unreadable)
    return f"data.on_bad_file=skip: {len(found)} of {total} files left out: {named}{more}"


def _cache(config: DataConfig) -> Path:
    if config.cache_dir is None:
        from app.data.hub import default_cache  # imports `datasets`

        return default_cache() / "graphfold"
    return Path(config.cache_dir) / "graphfold"


def _key(config: DataConfig, tokenizer: Tokenizer, sources: Sources) -> str:
    read = (FORMAT, config.source.value, config.config_name, config.split, config.text_field)
    # Added where it matters only: caches of earlier versions keep their names.
    bad = (config.on_bad_file.value,) if config.on_bad_file is BadFile.skip else ()
    # Their tokens stay where they are.
    paths = [file.path for file in sources.files] if config.source is Source.megatron else []
    made_of = repr(((*read, *bad, *paths), sources.record(), sources.times())).encode()
    return hashlib.sha256(made_of + pickle.dumps(tokenizer)).hexdigest()[:32]


def _fault(folder: Path) -> str | None:
    """Why a folder cannot be used, None where it can."""
    try:
        files = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))["files"]
        for name, (size, content) in files.items():
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found} bytes instead of {size}"
            if file_sum(folder / name) != content:
                return f"{name} has other contents than it was written with"
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{CONTENTS} is not what was written"
    return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time prepare a folder; clear what a killed one has left of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: then several do the same work
            yield
            return
        for left in folder.parent.glob(f".{folder.name}.partial-*"):
            shutil.rmtree(left)
        yield


def _write(config: DataConfig, tokenizer: Tokenizer, sources: Sources, *, folder: Path) -> None:
    from app.data.corpus import write_tokens
    from app.data.megatron import check_pairs

    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        if config.source is Source.megatron:
            written = check_pairs(config, tokenizer, sources)
        else:
            written = write_tokens(config, tokenizer, sources, folder=temporary)
        shutil.rmtree(temporary / "raw", ignore_errors=True)
        check_unchanged(config, sources)
        paths = [temporary / name for name in written.names]
        files = {path.name: (path.stat().st_size, file_sum(path)) for path in paths}
        contents: dict[str, Any] = {"files": files, "left_out": written.left_out}
        if written.mapped:
            contents |= {"mapped": written.mapped, "open_end": written.open_end}
        (temporary / CONTENTS).write_text(json.dumps(contents) + "\n", encoding="utf-8")
        temporary.chmod(0o755)  # from that of a private folder: others may use a shared cache
        _replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(temporary: Path, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
