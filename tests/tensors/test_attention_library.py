"""Transformer Engine's attention on a stand-in for the library: which functions get what, gradients
beside torch's, parts of larger tensors. Its kernels are tested on a GPU.

Shapes: B sequences, S queries, K keys, N query heads, G key/value heads, H head width.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from app.choices import AttentionBackendKind, CpComm, Dtype
from app.config import DataConfig, ParallelConfig, PrecisionConfig, Run, TrainConfig
from app.errors import ConfigError
from app.model.attention.chosen import attention_line, library_attention, torch_attention
from app.model.attention.transformer_engine import TransformerEngineAttention
from app.model.layers import transformer_engine as library
from app.model.layers.attend import DocumentOffsets, TorchAttention, by_flash
from app.rules.attention import check_attention
from tests.runs import TINY, make_run
from tests.tensors.activation_memory import MODELS, measured, planned, run_of, with_kernels

B, S, N, G, H = 2, 6, 4, 2, 8
CPU, GPU = torch.device("cpu"), torch.device("cuda")
KIND = AttentionBackendKind.transformer_engine
BY_LIBRARY = TrainConfig(attention_backend=KIND)
kernels = pytest.fixture(with_kernels)
STATE = 2  # numbers


class Library:
    """Stand-in for the library's two functions: computes with torch and records its arguments."""

    FusedAttnBackend = MappingProxyType({"F16_arbitrary_seqlen": "kernels"})

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.shapes: list[tuple[torch.Size, torch.Size]] = []  # of queries and keys

    def fused_attn_fwd(
        self, *, is_training: bool, q: Tensor, k: Tensor, v: Tensor, **named: Any
    ) -> tuple[Tensor, list[Tensor] | None]:
        self._check(q, k, v, named)
        self.calls.append({"is_training": is_training, **named})
        out = self._attend(q, k, v, named)
        rows = torch.full((*q.shape[:-1], 1), 7.0)
        return out, [rows, torch.empty(STATE, dtype=torch.int64)] if is_training else None

    def fused_attn_bwd(
        self, *, q: Tensor, k: Tensor, v: Tensor, o: Tensor, d_o: Tensor, **named: Any
    ) -> list[Tensor | None]:
        self._check(q, k, v, named)
        kept = named["aux_ctx_tensors"]
        assert d_o.is_contiguous() and [each.numel() for each in kept[1:]] == [STATE]
        assert kept[0].shape == (*q.shape[:-1], 1)
        self.calls.append(named)
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        with torch.enable_grad():
            again = self._attend(*leaves, named)
        torch.testing.assert_close(again.detach(), o)
        return [*torch.autograd.grad(again, leaves, d_o), None, None]

    def _check(self, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> None:
        assert all(each.is_contiguous() for each in (q, k, v)), "its layouts have no strides"
        self.shapes.append((q.shape, k.shape))
        assert named["fake_dtype"] == q.dtype and named["fused_attention_backend"] == "kernels"
        for each, kind in ((q, "q"), (k, "kv")):
            ends = named[f"cu_seqlens_{kind}"]
            assert ends.dtype == torch.int32
            if named["qkv_layout"] == "bshd_bshd_bshd":
                length = each.shape[1]
                assert named[f"max_seqlen_{kind}"] == length
                assert ends.tolist() == [n * length for n in range(len(q) + 1)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> Tensor:
        left, right = named["window_size"]
        assert right == 0
        choices = {"window": None if left < 0 else left + 1, "scale": named["attn_scale"]}
        if named["qkv_layout"] == "bshd_bshd_bshd":
            return TorchAttention()(q, k, v, documents=None, **choices)
        assert named["qkv_layout"] == "thd_thd_thd" and named["o_format"] == "thd"
        pieces = [q.new_zeros(0, *q.shape[1:])]
        lists = [
            named[f"cu_seqlens_{name}"].tolist() for name in ("q_padded", "kv_padded", "q", "kv")
        ]
        for n in range(len(lists[0]) - 1):
            q_start, k_start, *_ = (each[n] for each in lists)
            q_count, k_count = (each[n + 1] - each[n] for each in lists[2:])
            assert bool(q_count) == bool(k_count)
            assert q_count == k_count or named["attn_mask_type"].endswith("bottom_right")
            if q_count:
                own = q[q_start:][:q_count], k[k_start:][:k_count], v[k_start:][:k_count]
                each = TorchAttention()(*(part[None] for part in own), documents=None, **choices)
                pieces.append(each[0])
        return torch.cat(pieces)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    name = f"{TransformerEngineAttention.__module__}.import_module"
    monkeypatch.setattr(name, lambda module: found)
    return found


def heads(queries: int, keys: int, strided: bool = False) -> list[Tensor]:
    """Queries, keys, values; `strided`: as parts of one tensor."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, queries, N, H, generator=generator)
    both = torch.randn(B, keys, 2 * G, H, generator=generator)
    parts = [q, *both.chunk(2, dim=2)]
    return [part if strided else part.contiguous() for part in parts]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize(("queries", "keys"), [(S, S), (S // 2, S)])
@pytest.mark.parametrize("strided", [False, True])
def test_outputs_and_gradients_are_those_of_torch(
    stand_in: Library, deterministic: bool, scale: float | None, queries: int, keys: int, *,
    strided: bool,
):  # fmt: skip
    def found(attend: Any) -> list[Tensor]:
        leaves = [each.requires_grad_() for each in heads(queries, keys, strided)]
        out = attend(*leaves, window=None, documents=None, scale=scale)
        grad = torch.linspace(-1, 1, out.numel()).view(out.shape[::-1]).permute(3, 2, 1, 0)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    theirs = found(TransformerEngineAttention(deterministic))
    for one, other in zip(theirs, found(TorchAttention()), strict=True):
        torch.testing.assert_close(one, other)
    forward, backward = stand_in.calls
    mask = "causal" if queries == keys else "causal_bottom_right"
    for call in (forward, backward):
        assert (call["attn_mask_type"], call["window_size"]) == (mask, (-1, 0))
        assert call["attn_scale"] == (H**-0.5 if scale is None else scale)
        assert (
            call["dropout"] == 0.0
            and call["cuda_graph"] is False
            and call["qkv_layout"] == "bshd_bshd_bshd"
        )
    assert forward["is_training"] and backward["deterministic"] is deterministic


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [S, S // 2])
@pytest.mark.parametrize("apart", [True, False], ids=["documents", "whole sequences"])
def test_documents_and_windows_are_those_of_torch(
    stand_in: Library, apart: bool, queries: int, window: int | None
):
    ends = torch.tensor([[1, 4, S, S], [S, S, S, S]], dtype=torch.int32)
    documents = DocumentOffsets.of(ends, queries, S) if apart else None

    def found(attend: Any) -> list[Tensor]:
        leaves = [each.requires_grad_() for each in heads(queries, S, strided=True)]
        out = attend(*leaves, window=window, documents=documents, scale=None)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(1))]

    theirs = found(TransformerEngineAttention(deterministic=False))
    for one, other in zip(theirs, found(TorchAttention()), strict=True):
        torch.testing.assert_close(one, other)
    mask = "causal" if queries == S else "causal_bottom_right"
    for call in stand_in.calls:
        assert call["attn_mask_type"] == (f"padding_{mask}" if apart else mask)
        assert call["window_size"] == (-1 if window is None else window - 1, 0)
    assert stand_in.calls[1]["do_format"] == ("thd" if apart else "bshd")


def test_flash_gets_what_its_kernels_take():
    """No CPU has them: torch checks their arguments, and shapes of what they return."""
    q, k, v = (
        torch.empty(B, length, count, H, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for length, count in ((3, N), (S, G), (S, G))
    )
    documents = DocumentOffsets.of(torch.full((B, 5), S, dtype=torch.int32, device="meta"), 3, S)
    for window in (None, 2):
        for given in (documents, None):
            out = TorchAttention()._by_flash(q, k, v, window=window, documents=given, scale=None)
            assert out.shape == q.shape
            grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
            assert [each.shape for each in grads] == [each.shape for each in (q, k, v)]
    assert by_flash(torch.float16, 256) and by_flash(torch.bfloat16, 8)
    assert not by_flash(torch.float32, 64) and not by_flash(torch.bfloat16, 12)


def test_nothing_is_kept_where_nothing_is_trained(stand_in: Library):
    attend = TransformerEngineAttention(deterministic=True)
    leaves = [each.requires_grad_() for each in heads(S, S)]
    with torch.no_grad():
        attend(*leaves, window=None, documents=None, scale=None)
    attend(*heads(S, S), window=None, documents=None, scale=None)
    assert [call["is_training"] for call in stand_in.calls] == [False, False]


def test_what_is_kept_are_views_of_what_came_in(stand_in: Library):
    leaves = [each.requires_grad_() for each in heads(S, S, strided=True)]
    out = TransformerEngineAttention(deterministic=True)(
        *leaves, window=None, documents=None, scale=None
    )
    kept = [each.data_ptr() for each in out.grad_fn.saved_tensors]
    assert kept[:4] == [each.data_ptr() for each in (*leaves, out)]


def by_library(**sections: Any) -> Run:
    return make_run(train=BY_LIBRARY, precision=PrecisionConfig(Dtype.bfloat16), **sections)


def refusal(device: torch.device) -> str:
    with pytest.raises(ConfigError) as refused:
        library_attention(by_library(), torch.bfloat16, device)
    line = str(refused.value)
    assert line.startswith("train.attention_backend=transformer_engine: ") and "\n" not in line
    return line


def test_a_host_without_it_is_told_what_to_install():
    assert "computes on GPUs, and this run does on a CPU; did you mean torch?" in refusal(CPU)
    line = refusal(GPU)
    assert "is not installed; did you mean torch?; pip install 'graphfold[gpu]'" in line


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the checks for a Hopper GPU and for the library succeed."""
    monkeypatch.setattr(library.metadata, "version", lambda name: "2.20.2")
    monkeypatch.setattr(library, "import_module", lambda name: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **named: zeros(*sizes, **named))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_gpu_that_cannot_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, stand_in: Library, on_a_gpu: None
):
    attend = library_attention(by_library(), torch.bfloat16, GPU)
    assert isinstance(attend, TransformerEngineAttention)
    line = attention_line(by_library(), torch.bfloat16, GPU)
    assert line is not None and line.startswith("cuDNN by Transformer Engine 2.20.2, gradients in")

    def fail(**named: Any) -> None:
        raise RuntimeError("no plan for this head\nat line 3")

    monkeypatch.setattr(stand_in, "fused_attn_bwd", fail)
    assert "no kernel here for heads of 8: no plan for this head; did" in refusal(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    line = refusal(GPU)
    assert "not on this one; did you mean torch or train.deterministic=false?" in line


def test_what_is_tried_has_the_heads_of_a_rank(stand_in: Library, on_a_gpu: None):
    """Whole heads of a model of four and two, cut by tp; fewer queries where keys are gathered."""
    tried = []
    for parallel in (
        ParallelConfig(),
        ParallelConfig(tp=2),
        ParallelConfig(cp=2),
        ParallelConfig(cp=2, cp_comm_type=CpComm.all_to_all),
    ):
        library_attention(by_library(parallel=parallel), torch.bfloat16, GPU)
        forward, backward = stand_in.calls[-2:]
        assert forward["attn_mask_type"] == backward["attn_mask_type"]
        tried.append((*map(tuple, stand_in.shapes[-1]), forward["attn_mask_type"]))
    assert tried == [
        ((1, 64, 4, 8), (1, 64, 2, 8), "causal"),
        ((1, 64, 2, 8), (1, 64, 1, 8), "causal"),
        ((1, 32, 4, 8), (1, 64, 2, 8), "causal_bottom_right"),
        ((1, 64, 2, 8), (1, 64, 1, 8), "causal"),
    ]


@pytest.mark.parametrize("model", ["dense", "grouped_tied", "latent"])
def test_autograd_keeps_what_is_planned(model: str, stand_in: Library, kernels: None):
    run = run_of(MODELS[model], Dtype.bfloat16)
    run = dataclasses.replace(
        run, train=dataclasses.replace(run.train, attention_backend=KIND, deterministic=True)
    )
    assert sum(measured(run).values()) == pytest.approx(planned(run).total, rel=0.05)
    assert stand_in.calls


def test_torch_attends_unless_another_is_asked_for():
    for deterministic in (True, False):
        run = make_run(train=TrainConfig(deterministic=deterministic))
        assert torch_attention(run, torch.float32, CPU) == TorchAttention(deterministic)


def test_documents_say_which_kernels_attend(monkeypatch: pytest.MonkeyPatch):
    apart = {"data": DataConfig(document_mask=True)}
    run = make_run(**apart, precision=PrecisionConfig(Dtype.bfloat16))
    assert attention_line(make_run(), torch.float32, CPU) is None
    line = attention_line(run, torch.bfloat16, GPU)
    assert line == "documents by torch's Flash kernels, gradients in a fixed order"
    line = attention_line(make_run(**apart), torch.float32, GPU)
    assert line.endswith("sequences: Flash takes no heads of 8 values in float32")
    assert attention_line(run, torch.bfloat16, CPU).endswith("slow in long sequences: on a CPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="document_mask=true: needs compute capability 8"):
        torch_attention(run, torch.bfloat16, GPU)


def test_windows_say_which_kernels_attend(monkeypatch: pytest.MonkeyPatch):
    bf16 = PrecisionConfig(Dtype.bfloat16)
    short, long = (
        make_run(dataclasses.replace(TINY, sliding_window=size), precision=bf16) for size in (4, 16)
    )
    line = attention_line(short, torch.bfloat16, GPU)
    assert line == "windows by torch's Flash kernels, gradients in a fixed order"
    assert attention_line(long, torch.bfloat16, GPU) is None, "as long as sequences"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    torch_attention(long, torch.bfloat16, GPU)
    with pytest.raises(ConfigError, match="sliding_window=4: needs compute capability 8"):
        torch_attention(short, torch.bfloat16, GPU)


def test_documents_by_the_library_have_no_fixed_order():
    run = dataclasses.replace(by_library(), data=DataConfig(document_mask=True))
    with pytest.raises(ConfigError, match=r"no fixed order .* torch or train\.determ"):
        check_attention(run)
    train = dataclasses.replace(BY_LIBRARY, deterministic=False)
    check_attention(dataclasses.replace(run, train=train))
