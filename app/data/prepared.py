"""The cache of prepared corpora: tokens in arrow files, a folder for each corpus.

    <cache>/graphfold/<key>/contents.json     sizes and sums of the others
    <cache>/graphfold/<key>/tokens.arrow      documents as lists of ids

Of tokens that are used as they are, contents.json says that they have been checked.

The key covers contents, sizes and times of the sources, the tokenizer and what is read of them, so
that a changed file makes another entry. A folder is written as .<key>.partial and renamed when it
is complete; one that is not as `contents.json` says is made anew. What an interrupted start has
written is used by the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from app.choices import BadFile, Source
from app.config import DataConfig
from app.data.corpus import STATE, TokenWriter
from app.data.packing import Documents
from app.data.paths import source_option
from app.data.sources import Sources, check_unchanged, file_sum
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError, typed
from app.plan.formatting import count_of
from app.telling import telling

FORMAT = 1  # of a folder, and of how documents become tokens
CHAT_FORMAT = 2  # of how rows become conversations
CONTENTS = "contents.json"
MOST_NAMED = 3  # files in a line about those that were left out
QUIET_S = 2.0  # seconds that another process is waited for without a word
POLL_S = 0.05


def prepare_tokens(
    config: DataConfig, tokenizer: Tokenizer, sources: Sources, *, say: Callable[[str], object]
) -> Path:
    """The folder with the tokens of a corpus, which is written unless it is there.

    A second process that wants the same waits for the first. `say` is called with a line when it
    waits long, and when a folder is not whole and made anew. Raises ConfigError when the source
    cannot be read or holds no text, or the cache cannot be written.
    """
    folder = _cache(config) / _key(config, tokenizer, sources)
    if _fault(folder) is None:
        return folder
    try:
        with _alone(folder, say) as partial:
            if (fault := _fault(folder)) is not None:
                if folder.exists():
                    say(f"prepared again, since {folder} is not whole: {fault}")
                if _fault(partial) is not None:
                    _write(config, tokenizer, sources, partial=partial)
                if folder.exists():
                    shutil.rmtree(folder)
                # here, not where it is written: that process may have been killed before
                (partial / STATE).unlink(missing_ok=True)
                partial.rename(folder)
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
    """Which files or rows of a corpus data.on_bad_file has left out, in a line; None: none."""
    contents = _contents(folder)
    if bad_rows := contents.get("bad_rows"):
        rows = count_of(sum(count for count, _ in bad_rows.values()), "row")
        path, (_, fault) = next(iter(bad_rows.items()))
        files = count_of(len(bad_rows), "file")
        return f"data.on_bad_file=skip_rows: {rows} of {files} left out: {path}: {fault}"
    found = [*sources.unreadable, *contents.get("left_out", ())]
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
    bad = (config.on_bad_file.value,) if config.on_bad_file is not BadFile.stop else ()
    # Their tokens stay where they are.
    paths = [file.path for file in sources.files] if config.source is Source.megatron else []
    chat = (CHAT_FORMAT,) if config.source is Source.chat else ()
    made_of = repr(((*read, *bad, *paths, *chat), sources.record(), sources.times())).encode()
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
def _alone(folder: Path, say: Callable[[str], object]) -> Iterator[Path]:
    """Let one process at a time prepare a folder; yield where, which is where a killed one did.

    The system unlocks what a process has locked when that ends, however it does.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        until = time.monotonic() + QUIET_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(POLL_S)
                    continue
                say(f"waits for another process that prepares {folder}")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: then several do the same work
                own = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
                own.chmod(0o755)  # others may use a shared cache
                try:
                    yield own
                finally:
                    shutil.rmtree(own, ignore_errors=True)
                return
            break
        yield folder.with_name(f".{folder.name}.partial")


def _write(config: DataConfig, tokenizer: Tokenizer, sources: Sources, *, partial: Path) -> None:
    from app.data.megatron import check_pairs

    partial.mkdir(exist_ok=True)
    try:
        if config.source is Source.megatron:
            written = check_pairs(config, tokenizer, sources)
        else:
            writer = TokenWriter(config, tokenizer, sources, folder=partial)
            key, value = source_option(config)
            what = f"preparing {key}={typed(value)}"
            with telling(what, writer.progress, stream=sys.stderr):
                written = writer.write()
        check_unchanged(config, sources)
    except ConfigError as error:
        if error.key != "data.num_proc":  # other files would have another key: nothing continues it
            shutil.rmtree(partial)
        raise
    shutil.rmtree(partial / "raw", ignore_errors=True)
    paths = [partial / name for name in written.names]
    files = {path.name: (path.stat().st_size, file_sum(path)) for path in paths}
    contents: dict[str, Any] = {"files": files, "left_out": written.left_out}
    if written.bad_rows:
        contents |= {"bad_rows": written.bad_rows}
    if written.mapped:
        contents |= {"mapped": written.mapped, "open_end": written.open_end}
    (partial / CONTENTS).write_text(json.dumps(contents) + "\n", encoding="utf-8")
