"""Parts of the memory plan by hand: state, layers and the head under every way to cut them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import AttentionBackendKind, CpComm, DispatcherKind, Dtype, ScheduleName
from app.config import (
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)
from app.plan.cost.flops import parameter_count
from app.plan.layout import ParallelLayout, select_layout
from app.plan.memory.activations import chunk_activations
from app.plan.memory.rank_memory import bytes_per_parameter
from app.plan.sharding.parameters import chunk_parameters
from app.plan.stages import Stage
from tests.plan.memory import DENSE, EXPERTS, MOE, kept, parts_of, run_of


@pytest.mark.parametrize(("params", "grads", "alone", "shared"), [
    (Dtype.float32, Dtype.float32, 16, (8, 8)), (Dtype.bfloat16, Dtype.float32, 18, (6, 12)),
    (Dtype.bfloat16, Dtype.bfloat16, 16, (4, 12)), (Dtype.float16, Dtype.float32, 18, (6, 12)),
])  # fmt: skip
def test_bytes_per_parameter(params: Dtype, grads: Dtype, alone: int, shared: tuple[int, int]):
    count = parameter_count(DENSE).total
    for dp in (1, 2, 8):
        parts = parts_of(
            run_of(parallel=ParallelConfig(dp=dp), precision=PrecisionConfig(params, grads))
        )
        state = parts["parameters"] + parts["gradients"] + parts["optimizer"]
        assert state == pytest.approx(count * (shared[0] + shared[1] / dp), rel=0.01)
    assert sum(bytes_per_parameter(PrecisionConfig(params, grads), OptimConfig())) == alone


def test_dense_layer_by_hand_with_tp_and_cp():
    """256 wide, 8 heads of 32, 512 wide feed-forward; 2 · 512 tokens."""
    layer, tokens = Stage((3,), False, False), 1024
    one = kept(run_of(), layer)
    assert one == {
        "rotary": 2 * 4 * tokens * 32,
        "attn": 2 * tokens * (256 + 256 + 768 + 256) + 4 * tokens * 8,
        "mlp": 2 * tokens * (256 + 256 + 1024 + 512),
    }
    four = kept(run_of(parallel=ParallelConfig(tp=4)), layer)
    assert four == {
        "rotary": one["rotary"],  # positions are those of all tokens
        "attn": 2 * tokens * (64 + 64 + 192 + 64) + 4 * tokens * 2,
        "mlp": 2 * tokens * (64 + 64 + 256 + 128),
    }
    for comm in CpComm:
        found = kept(run_of(parallel=ParallelConfig(cp=4, cp_comm_type=comm)), layer)
        assert {phase: found.pop(phase) for phase in ("rotary", "mlp")} == {
            phase: one[phase] // 4 for phase in ("rotary", "mlp")
        }
        input_and_norm, queries, keys, result = 2 * 256, 256, 2 * 256, 256  # per token
        # those of the whole sequence, or 1/4 of them for all its tokens
        copies = keys * 4 if comm is CpComm.all_gather else keys
        # the kernels' results, of both pieces or of whole sequences, are brought together or home
        # once more
        expected = (
            2 * (tokens // 4) * (input_and_norm + queries + copies + 2 * result)
            + 4 * (tokens // 4) * 8
        )
        assert found == {"attn": expected}


def test_documents_by_hand_with_context_parallelism():
    """Nothing in 16 bits; in fp32 a mask of queries × keys in each layer, and of gathered keys each
    piece of the queries sees those up to its end alone.
    """
    layer, apart = Stage((3,), False, False), DataConfig(document_mask=True)
    for comm, pairs in ((CpComm.all_gather, 64 * 64 * (1 + 8)), (CpComm.all_to_all, 512 * 512)):
        parallel = ParallelConfig(cp=4, cp_comm_type=comm)
        for dtype, entry in ((Dtype.bfloat16, 0), (Dtype.float32, 4)):
            sections = {"parallel": parallel, "precision": PrecisionConfig(dtype)}
            plain, masked = (
                kept(run_of(**sections, data=data), layer) for data in (DataConfig(), apart)
            )
            assert masked["attn"] - plain["attn"] == entry * 2 * pairs
            assert masked.keys() == plain.keys()


def test_a_layer_of_experts_by_hand():
    """16 experts of 128, 4 per token; ep 4 is planned for 1.5 times the mean rows; etp 2 sends
    each twice, halves the width.
    """
    layer, tokens, rows = Stage((0,), False, False), 1024, 6144
    for parallel in (ParallelConfig(dp=4, ep=4), ParallelConfig(dp=8, ep=4, etp=2)):
        etp = parallel.etp or 1
        found = kept(run_of(MOE, parallel=parallel), layer)
        assert found["norm"] == 2 * tokens * 256
        assert found["experts"] == 2 * etp * rows * (256 + 3 * 128 // etp)
        assert found["dispatch"] == 8 * etp * (4 * tokens + rows)
        # rows that came back and a probability for each; places of those that went out
        came = etp * 4 * tokens
        assert found["combine"] == (2 * 256 + 4) * came + 8 * etp * rows
        assert found["shared"] == 2 * tokens * 3 * 256
        # the norm's output, two maps of scores; probabilities and ids of the chosen experts
        assert found["route"] == 2 * tokens * 256 + 4 * tokens * (2 * 16 + 3 * 4)
    local = kept(run_of(MOE), layer)
    assert local["experts"] == 2 * 4096 * (256 + 3 * 128) and local["dispatch"] == 8 * 4096
    two = kept(run_of(MOE, parallel=ParallelConfig(dp=2, ep=2)), layer)
    most = dataclasses.replace(MOE, moe=dataclasses.replace(EXPERTS, planned_imbalance=9.0))
    worst = kept(run_of(most, parallel=ParallelConfig(dp=2, ep=2)), layer)
    # all rows of both ranks, no more
    assert worst["experts"] == two["experts"] * 2 / 1.5
    tensor = kept(run_of(MOE, parallel=ParallelConfig(tp=2, etp=1)), layer)
    assert tensor["combine"] * 2 == local["combine"] and tensor["norm"] * 2 == local["norm"]


HEAD, SPLIT = Stage((), False, True), ScheduleConfig(ScheduleName.zero_bubble_h1)


def test_the_head_by_hand():
    """Logits in the parameters' type, which backward turns into their gradient."""
    for micro_batch, tp in ((2, 1), (2, 4), (8, 1), (8, 4)):
        tokens = 512 * micro_batch
        train = TrainConfig(seq_len=512, micro_batch=micro_batch, global_batch=64)
        run = run_of(parallel=ParallelConfig(tp=tp), train=train)
        memory = chunk_activations(run, HEAD, ParallelLayout(tp, tp=tp)).usual
        gathered = 2 * tokens * 256 if tp > 1 else 0
        own, logits = 2 * tokens * 256 // tp, 2 * tokens * 1024 // tp
        # what the norm reads and makes, logits, three numbers per token
        assert memory.kept["head"] == 2 * own + logits + 13 * tokens
        # what is gathered again, and the gradient of hidden states before it is cut; the rank's
        # own, and as much for the residual stream
        assert memory.backward == 2 * gathered + 2 * own - 13 * tokens
        split = dataclasses.replace(run, schedule=SPLIT)
        waiting = chunk_activations(split, HEAD, ParallelLayout(tp, tp=tp)).usual.waiting
        assert waiting == own + logits  # for the weight's gradient
    single = run_of(precision=PrecisionConfig())
    memory = chunk_activations(single, HEAD, ParallelLayout(1)).usual
    # here the weight's gradient is stored as well
    assert memory.backward == 4 * (2 * 1024 + 1024) * 256 - 13 * 1024


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("chunk", [512, 4096, 8192])
def test_the_head_by_chunks_by_hand(chunk: int, tp: int):
    """No logits are kept. Backward has those of a chunk beside the next one's or the weight's
    gradient, and sums that of 4096 / tp rows of the weight in fp32.
    """
    tokens, vocab = 4096, dataclasses.replace(DENSE, vocab_size=4096)
    train = TrainConfig(seq_len=512, micro_batch=8, global_batch=64)
    loss = LossConfig(chunk_tokens=chunk)
    run = run_of(vocab, parallel=ParallelConfig(tp=tp), train=train, loss=loss)
    memory = chunk_activations(run, HEAD, ParallelLayout(tp, tp=tp)).usual
    own, table = 2 * tokens * 256 // tp, 2 * 4096 // tp * 256
    logits = 2 * min(chunk, tokens) * 4096 // tp
    assert memory.kept["head"] == 2 * own + 13 * tokens
    loop = logits + max(table, logits if chunk < tokens else 0)
    assert memory.backward == pytest.approx(2 * tp * own + 2 * table + loop, rel=0.05)
    split = dataclasses.replace(run, schedule=SPLIT)
    waiting = chunk_activations(split, HEAD, ParallelLayout(tp, tp=tp)).usual.waiting
    assert waiting == 2 * table


def test_experts_with_a_capacity_by_hand():
    """ceil(1024·4/16 · 1.2) = 308 rows for each of 16 experts from each rank: a bound, or filled
    up to.
    """
    layer, tokens, most = Stage((0,), False, False), 1024, 16 * 308
    bounded = {"capacity_factor": 1.2, "planned_imbalance": 4.0}

    def found(dp: int, ep: int, **choices: Any) -> dict[str, int]:
        model = dataclasses.replace(MOE, moe=dataclasses.replace(EXPERTS, **choices))
        return kept(run_of(model, parallel=ParallelConfig(dp=dp, ep=ep)), layer)

    def experts(rows: int) -> int:
        return 2 * rows * (256 + 3 * 128)

    assert found(4, 4)["experts"] == experts(4 * tokens * 3 // 2)
    assert found(4, 4, **bounded)["experts"] == experts(most)
    assert found(4, 4, **bounded | {"planned_imbalance": 1.1})["experts"] == experts(
        round(1.1 * 4 * tokens)
    )
    for dp, ep in ((1, 1), (4, 4)):
        assert found(dp, ep, capacity_factor=1.2, pad_to_capacity=True)["experts"] == experts(most)
    # nobody waits to learn how many are left
    assert found(1, 1, **bounded)["experts"] == experts(4 * tokens)
    small = found(4, 4, **bounded | {"capacity_factor": 0.5})
    assert small["experts"] == experts(16 * 128) and small["combine"] - found(4, 4)["combine"] < 0


def test_experts_that_gather_all_tokens_by_hand():
    """The tokens themselves are gone once rows are picked; of the choices of all ranks, places
    stay, and probabilities.
    """
    layer, tokens, rows = Stage((0,), False, False), 1024, 6144
    gathers = dataclasses.replace(
        MOE, moe=dataclasses.replace(EXPERTS, dispatcher=DispatcherKind.all_gather)
    )
    for etp in (1, 2):
        found = kept(run_of(gathers, parallel=ParallelConfig(dp=4 * etp, ep=4, etp=etp)), layer)
        choices = 4 * etp * 4 * tokens
        assert found["dispatch"] == 8 * choices
        assert found["experts"] == 2 * etp * rows * (256 + 3 * 128 // etp)
        assert found["combine"] == 2 * etp * rows * 256 + 4 * choices


def test_the_second_part_of_a_split_backward_by_hand():
    """The largest gradient of a matrix, made on its own only where sums have no more bits; with
    tp, tokens gathered for it.
    """
    for model, degrees in ((DENSE, {"tp": 2}), (DENSE, {}), (MOE, {"ep": 4, "etp": 2})):
        layout, parallel = (
            ParallelLayout(8 * degrees.get("tp", 1), **degrees),
            ParallelConfig(dp=8, **degrees),
        )
        gathered = 2 * 1024 * 256 if "tp" in degrees else 0  # bf16
        for stage in (
            Stage((0,), True, False),
            Stage((1, 2), False, False),
            Stage((3,), False, True),
        ):
            matrices = {
                spec.name.rpartition(".")[2]: 2 * spec.numel
                for spec in chunk_parameters(model, stage, layout)
            }
            alone = max(matrices[name] for name in ("wo", "w_down", "head") if name in matrices)
            widened = max(matrices["wqkv"], matrices["w_up"])
            for grads, wanted in (
                (Dtype.float32, gathered),
                (Dtype.bfloat16, max(alone, widened + gathered)),
            ):
                run = run_of(
                    model,
                    parallel=parallel,
                    precision=PrecisionConfig(Dtype.bfloat16, grads),
                    schedule=SPLIT,
                )
                assert chunk_activations(run, stage, layout).deferred == wanted
            assert chunk_activations(run_of(model, parallel=parallel), stage, layout).deferred == 0


BY_LIBRARY = TrainConfig(
    seq_len=512,
    micro_batch=2,
    global_batch=64,
    attention_backend=AttentionBackendKind.transformer_engine,
)


def attention_backward(model: ModelConfig, train: TrainConfig, **sections: Any) -> int:
    """Bytes at the peak of a layer's backward."""
    run = run_of(model, train=train, **sections)
    layout = select_layout(run)
    return chunk_activations(run, Stage((0,), False, False), layout).usual.backward


def test_working_memory_of_attention_by_transformer_engine():
    """A fixed order has a matrix of all scores, any order a sum of the queries' gradient in fp32;
    gradients of keys and values are made per query head.
    """
    tokens, wide = 1024, dataclasses.replace(DENSE, num_heads=32, num_kv_heads=32, head_dim=32)
    any_order = dataclasses.replace(BY_LIBRARY, deterministic=False)
    found = attention_backward(wide, BY_LIBRARY) - attention_backward(wide, any_order)
    assert found == 2 * tokens * 32 * 512
    by_torch = dataclasses.replace(any_order, attention_backend=AttentionBackendKind.torch)
    for model in (wide, dataclasses.replace(wide, num_kv_heads=4)):
        assert attention_backward(model, any_order) == attention_backward(model, by_torch)


def test_unfused_attention_stores_its_probabilities():
    grouped, layer = dataclasses.replace(DENSE, num_kv_heads=2), Stage((0,), False, False)
    scores = 4 * 1024 * 8 * 512
    fp32, bf16 = (
        kept(run_of(grouped, precision=PrecisionConfig(dtype)), layer)["attn"]
        for dtype in (Dtype.float32, Dtype.bfloat16)
    )
    assert fp32 > scores > bf16
