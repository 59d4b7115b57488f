"""docs/talk.md: from source files to a model that answers with a docstring."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.start.overlaid import overlaid
from app.errors import ConfigError
from app.hf.hub import config_folder
from scripts.docstrings import LONGEST, conversations, functions
from tests.integration.chat import chatted
from tests.pages import blocks_of, lines_of
from tests.programs import run_forked
from tests.training import ROOT

TRAIN, TUNE, TALK = blocks_of(ROOT / "docs/talk.md")
LIBRARY = Path(sysconfig.get_path("stdlib"))
MODULES = ("bisect", "calendar", "cmd", "fnmatch", "heapq", "sched", "shlex", "textwrap")
SMALLER = {"--size ": "400", "train.seq_len=": "160", "train.steps=": "2"}
SOURCE = '''
class A:
    @property
    def name(self):
        """Return the name.

        More."""
        # by hand
        return self._name

    async def none(self):
        """Only a docstring."""

    def bare(self):
        return 1
'''


def test_functions_are_written_without_their_docstrings(tmp_path: Path):
    assert [*functions(SOURCE)] == [
        ("def name(self):\n    # by hand\n    return self._name", "Return the name.")
    ]
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text(SOURCE.replace("name", "n" * LONGEST))
    (row,) = conversations([tmp_path / "b.py", tmp_path / "a.py"])
    user, assistant = row["messages"]
    assert user["role"] == "user" and user["content"].startswith("def name")
    assert assistant == {"role": "assistant", "content": "Return the name."}


def test_run_in_place_of_its_export_is_refused(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    for advice in (f"to-hf {run} FOLDER writes one", f"did you mean {run}/hugging_face?"):
        with pytest.raises(ConfigError) as error:
            config_folder(str(run), "model.init_from")
        assert "is a run, and a model is" in str(error.value) and advice in str(error.value)
        (run / "hugging_face").mkdir(exist_ok=True)
        (run / "hugging_face/config.json").touch()


def test_fine_tuning_takes_the_tokenizer_of_its_model():
    words = ("+experiment=finetune", f"model.init_from={ROOT}/tests/golden/hugging_face")
    typed = Typed((*words, "data=chat", "data.path=a"))
    assert overlaid(typed) == []
    assert load_typed(typed).data.tokenizer == f"{ROOT}/tests/golden/hugging_face"


def smaller(script: str) -> str:
    """The script of a page, with programs of this interpreter and the sizes of the test."""
    for key, value in SMALLER.items():
        script = re.sub(rf"{key}\S+", f"{key}{value}", script)
    return script.replace('"$LIB/*.py"', "'lib/*.py'")


@pytest.mark.full
def test_page_runs_small(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    for name in MODULES:
        shutil.copy(LIBRARY / f"{name}.py", tmp_path / "lib")
    found, *lines = lines_of([TRAIN, TUNE])
    line = f"PATH={Path(sys.executable).parent}:$PATH; {found}; echo $LIB"
    said = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert Path(said.stdout.strip()) == LIBRARY
    for line in map(smaller, lines):
        words = shlex.split(line.replace("scripts/", f"{ROOT}/scripts/"))[1:]
        if words[0] == "train.py":
            layers = [] if "model.init_from" in line else ["model.num_layers=1"]
            words = [f"{ROOT}/train.py", *words[1:], *layers, "train.eval_sequences=8"]
            words += ["data.cache_dir=cache", "train.sample_tokens=4"]
        if words[0].endswith("docstrings.py"):
            words += sorted(map(str, (tmp_path / "lib").iterdir()))
        ended = run_forked(tmp_path, [sys.executable, *words])
        assert ended.returncode == 0, f"{line}\n{ended.stderr}"
    rows = (tmp_path / "docstrings.jsonl").read_text().splitlines()
    assert len(rows) > 30 and all(json.loads(row)["messages"] for row in rows)
    _, _, program, run, *words = shlex.split(TALK.script)
    words = [word.replace("runs/", f"{tmp_path}/runs/") for word in words]
    code, out, err = chatted(tmp_path / run, "def f():\n", *words, "max_new_tokens=4")
    assert program == "app.cli.chat"
    assert code == 0, err
    assert out.startswith(f"== {tmp_path}/runs/code ==\n") and f"== {tmp_path}/runs/tuned ==" in out
    assert "step-00000002: no chat template: continues the text of all turns" in err
    assert f"chat template of {tmp_path}/runs/tuned/chat_template.jinja" in err
