"""The default mixture-of-experts model and its training loop by hand in plain PyTorch: what the
engine is measured against.

No phases, no schedule, no buffers: one class, one loop, index operations, `torch.optim.AdamW`.
Weights come from an engine, so that both compute the same numbers.

Shapes: B sequences, S tokens, T = B·S, D hidden, N heads, G key/value heads, H head width, K
experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from app.config import Run
from app.data.feed import Batch


class PlainModel:
    """Forward of a MoE transformer over a dictionary of weights named as the engine names them."""

    def __init__(self, run: Run, weights: Mapping[str, Tensor]) -> None:
        self.model, self.weights = (
            run.model,
            {name: value.detach().clone().requires_grad_() for name, value in weights.items()},
        )

    def loss(self, batch: Batch) -> Tensor:
        """Mean token loss of a microbatch plus its balancing losses."""
        w, model = self.weights, self.model
        x, extra = F.embedding(batch.tokens_BS, w["embedding"]), torch.zeros(())
        cos, sin = self._rotary(batch.tokens_BS.shape[1])
        for n in range(model.num_layers):
            x = x + self._attention(
                self._norm(x, f"layers.{n}.attn_norm.weight"), f"layers.{n}.attn", cos, sin=sin
            )
            y, aux = self._experts(
                self._norm(x, f"layers.{n}.body.norm.weight").flatten(0, 1), f"layers.{n}.body"
            )
            x, extra = x + y.view_as(x), extra + aux
        logits = F.linear(self._norm(x, "norm.weight"), w.get("head", w["embedding"]))
        return F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten()) + extra

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.model.norm_eps)

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        width = self.model.head_width
        inverse = self.model.rope_theta ** -(torch.arange(0, width, 2) / width)
        angles = (torch.arange(length)[:, None] * inverse).repeat(1, 2)[:, None]
        return angles.cos(), angles.sin()

    def _attention(self, x: Tensor, name: str, cos: Tensor, sin: Tensor) -> Tensor:
        groups, width = self.model.num_kv_heads, self.model.head_width
        per = self.model.num_heads // groups
        qkv = F.linear(x, self.weights[f"{name}.wqkv"]).unflatten(-1, (groups, per + 2, width))
        q, k, v = qkv.split((per, 1, 1), dim=3)
        q, k, v = (part.flatten(2, 3) for part in (q, k, v))
        q, k = (
            (
                p * cos + torch.cat((-p[..., width // 2 :], p[..., : width // 2]), -1) * sin
            ).transpose(1, 2)
            for p in (q, k)
        )
        out = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return F.linear(out.transpose(1, 2).flatten(2), self.weights[f"{name}.wo"])

    def _experts(self, x_TD: Tensor, name: str) -> tuple[Tensor, Tensor]:
        moe, w = self.model.moe, self.weights
        assert moe is not None
        logits = F.linear(x_TD, w[f"{name}.router.weight"])
        chosen, experts_TK = logits.topk(moe.top_k)
        probs_TK = chosen.softmax(-1)
        order_R = experts_TK.flatten().argsort(stable=True)
        token_R, counts_E = (
            order_R // moe.top_k,
            experts_TK.flatten().bincount(minlength=moe.num_experts),
        )
        ends_E = counts_E.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x_TD[token_R], w[f"{name}.experts.w_up"], offs=ends_E).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, w[f"{name}.experts.w_down"], offs=ends_E)
        out = torch.zeros_like(x_TD).index_add(0, token_R, rows * probs_TK.flatten()[order_R, None])
        share_E = counts_E / (len(x_TD) * moe.top_k)
        return out, moe.aux_loss_coeff * moe.num_experts * (
            share_E * logits.softmax(-1).mean(0)
        ).sum()


class PlainLoop:
    """Gradient accumulation, clipping and fused AdamW as a tutorial would write them."""

    def __init__(self, run: Run, model: PlainModel) -> None:
        matrices = [value for value in model.weights.values() if value.dim() >= 2]
        vectors = [value for value in model.weights.values() if value.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": run.optim.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (run.optim.beta1, run.optim.beta2)
        self.run, self.model = run, model
        self.optimizer = torch.optim.AdamW(
            groups, lr=run.optim.lr, betas=betas, eps=run.optim.eps, fused=True
        )

    def step(self, batches: Sequence[Batch], lr: float) -> float:
        """One update; the mean loss of its microbatches."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for batch in batches:
            loss = self.model.loss(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.weights.values(), self.run.optim.clip_norm)
        self.optimizer.step()
        return float(total)
