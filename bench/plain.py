"""The default mixture-of-experts model and its training loop by hand in plain PyTorch: what the engine is measured against.

No phases, no schedule, no buffers: one class, one loop, `torch.optim.AdamW`. Weights come from an engine, so that both
compute the same numbers.

Shapes: B sequences, S tokens, T = B·S, D hidden, N heads, G key/value heads, H head width, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from app.config import Run
from app.data.feed import Batch
from app.moe.experts import grouped_swiglu
from app.moe.permute import combine, permute, sort_by_expert
from app.moe.router import aux_loss, aux_routing, choose


class PlainModel:
    """Forward of a MoE transformer over a dictionary of weights named as the engine names them."""

    def __init__(self, run: Run, weights: Mapping[str, Tensor]) -> None:
        self.model, self.weights = run.model, {name: value.detach().clone().requires_grad_() for name, value in weights.items()}

    def loss(self, batch: Batch) -> Tensor:
        """Mean token loss of a microbatch plus its balancing losses."""
        w, model = self.weights, self.model
        x, extra = F.embedding(batch.tokens_BS, w["embedding"]), torch.zeros(())
        cos, sin = self._rotary(batch.tokens_BS.shape[1])
        for n in range(model.num_layers):
            x = x + self._attention(self._norm(x, f"layers.{n}.attn_norm.weight"), f"layers.{n}.attn", cos, sin)
            y, aux = self._experts(self._norm(x, f"layers.{n}.body.norm.weight").flatten(0, 1), f"layers.{n}.body")
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
        q, k = ((p * cos + torch.cat((-p[..., width // 2 :], p[..., : width // 2]), -1) * sin).transpose(1, 2) for p in (q, k))
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return F.linear(out.transpose(1, 2).flatten(2), self.weights[f"{name}.wo"])

    def _experts(self, x_TD: Tensor, name: str) -> tuple[Tensor, Tensor]:
        moe, w = self.model.moe, self.weights
        assert moe is not None
        logits = F.linear(x_TD, w[f"{name}.router.weight"])
        probs_TK, experts_TK = choose(logits, moe.top_k, moe.score)
        scores, chosen = aux_routing(logits, moe.top_k, moe.score)
        aux = aux_loss(scores, chosen.sum(0), moe.top_k, moe.aux_loss_coeff, len(x_TD))
        order = sort_by_expert(experts_TK, moe.num_experts)
        up, down = w[f"{name}.experts.w_up"], w[f"{name}.experts.w_down"]
        rows = grouped_swiglu(permute(x_TD, order), up, down, order.ends_E)
        return combine(rows, probs_TK, order), aux


class PlainLoop:
    """Gradient accumulation, clipping and fused AdamW as a tutorial would write them."""

    def __init__(self, run: Run, model: PlainModel) -> None:
        matrices = [value for value in model.weights.values() if value.dim() >= 2]
        vectors = [value for value in model.weights.values() if value.dim() < 2]
        groups = [{"params": matrices, "weight_decay": run.optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        betas = (run.optim.beta1, run.optim.beta2)
        self.run, self.model = run, model
        self.optimizer = torch.optim.AdamW(groups, lr=run.optim.lr, betas=betas, eps=run.optim.eps, fused=True)

    def step(self, batches: Sequence[Batch]) -> float:
        """One update; the mean loss of its microbatches."""
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for batch in batches:
            loss = self.model.loss(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.weights.values(), self.run.optim.clip_norm)
        self.optimizer.step()
        return float(total)
