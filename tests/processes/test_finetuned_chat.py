"""Fine-tuning of a published model on conversations tells the losses before and after."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from app.engine.report.summary import change_line
from app.engine.step.records import ValidationReport
from tests.pretrained_model import save_pretrained
from tests.programs import run_forked
from tests.runs import make_run, with_model
from tests.training import ROOT

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def test_losses_before_and_after_are_told(tmp_path: Path):
    rows = [ValidationReport(step, loss, 9) for step, loss in ((0, 2.31), (5, 1.9), (10, 1.42))]
    lines = [json.dumps({"step": row.step, **row.metrics(), "time": 1.0}) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = make_run()
    tuned = with_model(run, init_from="theirs")
    assert change_line(tuned, tmp_path, rows[-1]) == "validation loss 2.3100 → 1.4200"
    assert change_line(run, tmp_path, rows[-1]) is None
    assert change_line(tuned, tmp_path, rows[0]) is None
    assert change_line(tuned, tmp_path / "resumed elsewhere", rows[-1]) is None
    worse = dataclasses.replace(rows[-1], val_loss=2.5)
    assert change_line(tuned, tmp_path, worse) == "validation loss 2.3100 → 2.5000"


@pytest.mark.full
def test_experiment_fine_tunes_on_conversations(tmp_path: Path):
    save_pretrained(tmp_path / "theirs", experts=0)
    turn = {"role": "user", "content": "cat?"}, {"role": "assistant", "content": "the cat sat"}
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": turn}) + "\n") * 60)
    words = (
        "+experiment=finetune", "model.init_from=theirs", "data=chat", "data.path=talk.jsonl",
        "data.tokenizer=theirs", "data.chat_template=own.jinja", f"data.cache_dir={tmp_path}/cache",
        "train.seq_len=48", "train.global_batch=4", "train.steps=8", "train.device=cpu",
        "optim.lr=3e-3", "checkpoint.export_hf=true", "run_dir=run", "train.sample_tokens=0",
    )  # fmt: skip
    done = run_forked(tmp_path, [sys.executable, str(ROOT / "train.py"), *words])
    assert done.returncode == 0, done.stderr
    found = re.search(r"\n  validation loss (\d\.\d{4}) → (\d\.\d{4})\n", done.stdout)
    assert found and float(found[2]) < float(found[1]), done.stdout
    validated = re.findall(r"step [08]/8  validation loss (\d\.\d{4})", done.stdout)
    assert validated == [found[1], found[2]]
    folder = tmp_path / "run/hugging_face"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    line = [sys.executable, "-m", "app.cli.evaluate", "run", "data.path=talk.jsonl"]
    scored = run_forked(tmp_path, [*line, "data.cache_dir=cache"])
    assert scored.returncode == 0 and "tokens" in scored.stdout, scored.stderr
    assert float(scored.stdout.split()[2]) == pytest.approx(float(found[2]), abs=2e-2)
