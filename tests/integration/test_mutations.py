"""Bugs put in on purpose: for each, a default test of the named file must fail.

Each case changes one line in a copy of the checkout and runs that file there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COPIED = ("app", "conf", "graphfold", "hydra_plugins", "tests", "train.py", "pyproject.toml")


@dataclass(frozen=True)
class Bug:
    """One line of app/ made wrong, and the tests that must notice."""

    file: str  # in app/
    right: str
    wrong: str
    seen_by: str  # in tests/


BUGS = {
    "sign of the router's input gradient": Bug(
        "moe/router_matmul.py",
        "x_grad_TD = wide_gemm(",
        "x_grad_TD = -wide_gemm(",
        "tensors/test_router_matmul.py",
    ),
    "sign of the balancing bias": Bug(
        "moe/router.py",
        "torch.sign(counts_E.sum() - counts_E * counts_E.numel())",
        "torch.sign(counts_E * counts_E.numel() - counts_E.sum())",
        "tensors/test_router.py",
    ),
    "probabilities of sigmoid scores that do not add up": Bug(
        "moe/router.py",
        "return chosen_TK / (chosen_TK.sum(dim=-1, keepdim=True) + TINY)",
        "return chosen_TK",
        "tensors/test_router.py",
    ),
    "expert load of one rank instead of all": Bug(
        "moe/phases.py",
        "        all_reduce(counts, group)\n",
        "        pass\n",
        "processes/test_balance.py",
    ),
    "a bias that moves in a skipped step": Bug(
        "engine/step/step.py",
        "torch.where(skipped > 0, router.bias_E, moved_E)",
        "moved_E",
        "processes/test_updates_in_graphs.py",
    ),
    "a bias that moves in a step that is rerun": Bug(
        "engine/step/step.py",
        "torch.where(skipped > 0, router.bias_E, moved_E)",
        "torch.where((skipped > 0) & (self.shortage is None), router.bias_E, moved_E)",
        "processes/test_updates_in_graphs.py",
    ),
    "FP8 scales that move in a step that is rerun": Bug(
        "engine/step/step.py",
        "state.finish_step(skipped)",
        "state.finish_step(skipped * 0 if self.shortage is not None else skipped)",
        "processes/test_fp8_state.py",
    ),
    "one token more than an expert's capacity": Bug(
        "moe/capacity.py", "place_R < limit", "place_R <= limit", "tensors/test_capacity.py"
    ),
    "gradients of norms not summed over tensor-parallel ranks": Bug(
        "optim/distributed.py",
        "    all_reduce(total, group)\n",
        "",
        "processes/test_layouts.py",
    ),
    "a softmax over a part of the vocabulary": Bug(
        "model/layers/loss.py",
        "        all_reduce(both_2T, group)\n",
        "",
        "processes/test_tensor_parallel.py",
    ),
    "key gradients of one context-parallel rank": Bug(
        "model/layers/layer_groups.py",
        "reduce_scatter(own_BsF, parts_PBsF, ctx.group)",
        "own_BsF.copy_(parts_PBsF[ctx.group.rank()])",
        "processes/test_context_parallel.py",
    ),
    "a stale FP8 copy of the weights": Bug(
        "fp8/linear.py",
        "linear.stale = True",
        "linear.stale = False",
        "processes/test_fp8_training.py",
    ),
    "two microbatches in flight in one graph slot": Bug(
        "plan/graphs.py",
        "new = max(new, slots[place] + 1)",
        "new = max(new, slots[place])",
        "plan/test_graphs.py",
    ),
    "a forward too many before the first backward": Bug(
        "plan/schedule.py",
        "min(total, pp - pp_rank - 1)",
        "min(total, pp - pp_rank)",
        "plan/test_schedule.py",
    ),
    "a stream whose other ranks' sequences are read again": Bug(
        "data/stream.py",
        "self._catch_up(number, self.due[number] - 1)",
        "self._catch_up(number, 0)",
        "data/test_stream.py",
    ),
    "a torn batch that stays in a continued corpus": Bug(
        "data/corpus.py",
        "file.truncate(kept.size)",
        "file.truncate()",
        "data/test_interrupted.py",
    ),
    "a resumed run that repeats a sequence": Bug(
        "data/feed.py",
        "return cls(**state)",
        'return cls(**state | {"sequences": max(state["sequences"] - 1, 0)})',
        "data/test_feed.py",
    ),
    "a piece of a document that begins a token late": Bug(
        "data/best_fit.py",
        "start_P = runs(np.zeros_like(counts_D), counts_D) * size",
        "start_P = runs(np.zeros_like(counts_D), counts_D) * (size + 1)",
        "data/test_best_fit.py",
    ),
    "a bin that takes more documents than it may": Bug(
        "data/best_fit.py",
        "most - counts[bins])",
        "most + 1 - counts[bins])",
        "data/test_best_fit.py",
    ),
    "documents of Megatron by sequences": Bug(
        "data/megatron.py",
        "return dtype, starts[documents]",
        "return dtype, starts",
        "data/test_megatron.py",
    ),
    "labels that are the tokens themselves": Bug(
        "data/feed.py",
        "labels_BS = rows_BS1[:, 1:]",
        "labels_BS = rows_BS1[:, :-1]",
        "data/test_feed.py",
    ),
    "an end of document in the next document": Bug(
        "data/feed.py",
        "begins_BS[:, 1:] = ends_BS[:, :-1]",
        "begins_BS[:, 1:] = ends_BS[:, 1:]",
        "data/test_feed.py",
    ),
    "a window that is a token too long": Bug(
        "model/layers/attend.py",
        "(keys_K > places_S1 - window)",
        "(keys_K >= places_S1 - window)",
        "tensors/test_model.py",
    ),
    "the sign of a sink's gradient": Bug(
        "model/attention/sinks.py", ".sum(0).neg_()", ".sum(0)", "tensors/test_sinks.py"
    ),
    "a bias of feed-forwards that is taken away": Bug(
        "model/layers/layers.py",
        "self.w_down.forward(act, sink).add_(self.b_down)",
        "self.w_down.forward(act, sink).sub_(self.b_down)",
        "tensors/test_hf_parity.py",
    ),
    "factors of long sequences in one of the original length": Bug(
        "config/attention.py",
        "self.long_factors if length > self.original_length",
        "self.long_factors if length >= self.original_length",
        "tensors/test_long_positions.py",
    ),
    "scaled positions in layers with a window": Bug(
        "config/model.py",
        "rope = Rope(rope.width, self.local_rope_theta)",
        "rope = Rope(rope.width, self.local_rope_theta, factor=rope.factor)",
        "tensors/test_hf_parity.py",
    ),
    "a gate clamped on both sides": Bug(
        "kernels/clamped_swiglu.py",
        ".clamp(max=limit)",
        ".clamp(-limit, limit)",
        "tensors/test_hf_parity.py",
    ),
    "a range of frozen layers without its last": Bug(
        "plan/sharding/frozen.py",
        "low <= int(number) <= high",
        "low <= int(number) < high",
        "processes/test_frozen.py",
    ),
    "Muon's updates scaled by the shorter side": Bug(
        "optim/muon.py",
        "sqrt(max(rows, columns))",
        "sqrt(min(rows, columns))",
        "processes/test_muon.py",
    ),
    "a learning rate that is a step late": Bug(
        "optim/lr.py", "* step / warmup_steps", "* (step - 1) / warmup_steps", "tensors/test_lr.py"
    ),
    "weight decay of norms": Bug(
        "optim/adam.py",
        "weight_decay=weight_decay if decays else 0.0",
        "weight_decay=weight_decay",
        "processes/test_optimizer.py",
    ),
    "bf16 parameters that stay as they were": Bug(
        "optim/adam.py",
        "            self.own_params.copy_(self.main)\n",
        "            pass\n",
        "processes/test_optimizer.py",
    ),
    "a loss scale that rises after an overflow": Bug(
        "optim/scale.py", "self.scale * 0.5", "self.scale * 2.0", "tensors/test_loss_scale.py"
    ),
    "a norm kernel without its epsilon": Bug(
        "kernels/rms_norm.py", "/ width + eps)", "/ width)", "tensors/test_kernels_layer.py"
    ),
    "gradients of clones that do not return": Bug(
        "moe/clones/cloning.py",
        "        self.transport.return_grads(self.kind, total_LIO, self.clones)\n",
        "",
        "processes/test_clones.py",
    ),
    "a decoded token that does not see itself": Bug(
        "model/decoding/layer_caches.py",
        "> place_B[:, None]",
        ">= place_B[:, None]",
        "processes/test_decoding.py",
    ),
    "a conversation that answers another one's text": Bug(
        "engine/decoding/conversation.py",
        "self.cached == [*prompt[:known]]",
        "self.cached",
        "processes/test_conversation.py",
    ),
    "questions that are trained like answers": Bug(
        "data/marks.py",
        "(LAST - tokens) & 1 == 1",
        "(LAST - tokens) & 1 <= 1",
        "data/test_chat.py",
    ),
    "a cut conversation without an answer that stays": Bug(
        "data/truncate.py",
        "(left_D > 0)",
        "(left_D >= 0)",
        "data/test_truncate.py",
    ),
    "an answer without weight that is trained": Bug(
        "data/chat.py",
        "return found if all(weights)",
        "return found if any(weights)",
        "data/test_chat.py",
    ),
    "labels of all sources in the loss of each": Bug(
        "engine/step/source_losses.py",
        "torch.where(own_KB, counts_B, 0)",
        "counts_B.expand(own_KB.shape)",
        "processes/test_blended_runs.py",
    ),
    "gradients of adapters that only one rank of an expert has": Bug(
        "optim/distributed.py",
        "((False, self.groups.tp), (True, self.groups.etp_shared))",
        "((False, self.groups.tp), (True, None))",
        "processes/test_lora.py",
    ),
    "masks of adapters that all replicas share": Bug(
        "model/adapter_dropout.py",
        "(microbatch * replicas + index)",
        "(microbatch * replicas)",
        "tensors/test_adapter_dropout.py",
    ),
    "scales of experts' adapters that peft reads as larger": Bug(
        "hf/adapter.py",
        "lora.scale * lora.rank * usual if plain",
        "lora.alpha if plain",
        "processes/test_adapter_files.py",
    ),
    "damaged checkpoint files that are loaded": Bug(
        "engine/files/checkpoints.py",
        'found != manifest["files"][name]["sha256"]',
        'found == ""',
        "processes/test_checkpoint.py",
    ),
    "imported weights upside down": Bug(
        "hf/pretrained.py",
        "copy_(values.permute(part.order))",
        "copy_(values.permute(part.order).flip(0))",
        "tensors/test_hf_reading.py",
    ),
    "two values of a byte in the other order": Bug(
        "hf/mxfp4.py",
        "(value[byte % 16], value[byte // 16])",
        "(value[byte // 16], value[byte % 16])",
        "tensors/test_quantised_files.py",
    ),
    "FP8 scales as if regions began with a block": Bug(
        "hf/fp8.py",
        "first = low // size * size",
        "first = low",
        "tensors/test_quantised_files.py",
    ),
    "more of a pickle than its tensors": Bug(
        "hf/pickles.py",
        "weights_only=True, mmap=True",
        "weights_only=False, mmap=True",
        "tensors/test_pickled_files.py",
    ),
    "tokens ahead of the wrong layer": Bug(
        "model/ahead.py",
        "token_BS[:, :-k] = tokens_BS[:, k:]",
        "token_BS[:, :-1] = tokens_BS[:, 1:]",
        "tensors/test_prediction.py",
    ),
    "predictions ahead into the next document": Bug(
        "model/ahead.py",
        "torch.where(same_BS, labels_BS[:, k:], UNLABELLED)",
        "labels_BS[:, k:]",
        "tensors/test_prediction.py",
    ),
    "weights of losses ahead left out of backward": Bug(
        "model/layers/loss.py",
        "weight_T = weights_T * grad",
        "weight_T = (weights_T != 0) * grad",
        "tensors/test_prediction.py",
    ),
    "a copy of the embedding whose gradient stays apart": Bug(
        "plan/model/stage.py",
        "tied=model.copies_embedding and",
        "tied=model.tie_embeddings and",
        "processes/test_prediction_layouts.py",
    ),
    "a layer ahead that reads the graph before it": Bug(
        "engine/capture/partial.py",
        "follows = layers[nth + 1].follows",
        "follows = True",
        "processes/test_prediction_layouts.py",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BUGS)
def test_a_default_test_sees(name: str, tmp_path: Path):
    pytest.importorskip("triton")  # some are seen by kernels alone
    bug = BUGS[name]
    for each in COPIED:
        copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
        copy(ROOT / each, tmp_path / each)
    file = tmp_path / "app" / bug.file
    text = file.read_text()
    assert text.count(bug.right) == 1, f"app/{bug.file} has changed: choose another line"
    file.write_text(text.replace(bug.right, bug.wrong))
    line = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider"]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [*line, f"tests/{bug.seen_by}"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert re.search(r"\b1 failed\b", ended.stdout), ended.stdout[-2000:]
