from __future__ import annotations

from itertools import product
from math import prod

import pytest

from app.plan.shards import BufferLayout, Range, buffer_layout, shard_map
from tests.cases import each
from tests.oracle import oracle

# Megatron-Core 0.16.1
GOLDEN = oracle("optim")
KINDS = {"bfloat16": "bf16", "float32": "fp32"}


def golden_buffers() -> list[tuple[dict, dict, list[dict], bool, int]]:
    """Every buffer that needs no bucket of its own for tied embeddings: case, buffer,
    parameters, expert, position.
    """
    found = []
    for case in GOLDEN["cases"]:
        if "error" in case or any(
            param.get("shared_embedding") for param in case["args"]["params"]
        ):
            continue
        dense = [(buffer, False) for buffer in case["buffers"]]
        for at, (buffer, expert) in enumerate(
            dense + [(buffer, True) for buffer in case.get("expert_buffers", [])]
        ):
            kind = KINDS[buffer["param_dtype"]]
            params = [{"name": f"p{i}", **param} for i, param in enumerate(case["args"]["params"])]
            params = [
                param
                for param in params
                if (param.get("dtype", "bf16"), param.get("expert", False)) == (kind, expert)
            ]
            found.append(
                (case, buffer, [param for param in params if not param.get("frozen")], expert, at)
            )
    return found


def laid_out(case: dict, buffer: dict, params: list[dict]) -> BufferLayout:
    """The golden rules: parameters at multiples of 64, buckets at multiples of 128 (2¹⁶ if padded
    for bandwidth); a buffer that is reduced but not sharded has no padding, which is what one rank
    gives."""
    args = case["args"]
    bucket = None if args.get("disable_bucketing") else case["effective_bucket_size"]
    numels = [prod(param["shape"]) for param in params]
    if not args.get("distopt", True):
        return buffer_layout(numels, 1, bucket_numel=bucket)
    align = 2**16 if args.get("pad") else 128
    return buffer_layout(
        numels, buffer["dp_size"], bucket_numel=bucket, param_align=64, shard_align=align
    )


@each(golden_buffers())
def test_buffers_and_shards_equal_the_golden_ones(
    case: dict, buffer: dict, params: list[dict], expert: bool, at: int
):
    layout = laid_out(case, buffer, params)
    assert layout.numel == buffer["numel"]
    assert [list(bucket) for bucket in layout.buckets] == buffer["bucket_indices"]
    assert (list(layout.bucket_used), sum(layout.bucket_used)) == (
        buffer["bucket_numel_unpadded"],
        buffer["numel_unpadded"],
    )
    names = [param["name"] for param in params]
    places = zip(names, layout.params, layout.bucket_of, strict=True)
    assert {name: [*place, bucket] for name, place, bucket in places} == buffer["param_index"]
    for rank, of_rank in enumerate([] if expert else case.get("shards", [])):
        golden = {
            name: (bucket, *(tuple(pair) for pair in (world, local, param)))
            for bucket, shards in enumerate(of_rank[at])
            for name, (world, _, local, param) in shards.items()
        }
        assert {
            name: owned[0] for name, owned in zip(names, layout.ranges(rank), strict=True) if owned
        } == golden


def test_worked_example_of_four_parameters_on_four_ranks():
    # in registration order; the buffer holds them reversed: [0, 3) [3, 8) [8, 11) [11, 16)
    numels = [5, 3, 5, 3]
    assert shard_map(numels, 4, 0) == [
        [],
        [],
        [Range(0, (3, 4), (3, 4), param=(0, 1))],
        [Range(0, (0, 3), (0, 3), param=(0, 3))],
    ]
    assert shard_map(numels, 4, 1) == [[], [], [Range(0, (4, 8), (0, 4), param=(1, 5))], []]
    assert shard_map(numels, 4, 2) == [
        [Range(0, (11, 12), (3, 4), param=(0, 1))],
        [Range(0, (8, 11), (0, 3), param=(0, 3))],
        [],
        [],
    ]
    assert shard_map(numels, 4, 3) == [[Range(0, (12, 16), (0, 4), param=(1, 5))], [], [], []]


SIZES = [[], [1], [7, 1, 30, 2, 2, 19], [64] * 5, [3, 0, 5], [1000, 1]]


@each(product(SIZES, (1, 2, 3, 8), (None, 1, 20), (1, 16)))
def test_every_element_is_owned_once(
    numels: list[int], world: int, bucket_numel: int | None, align: int
):
    layout = buffer_layout(
        numels, world, bucket_numel=bucket_numel, param_align=align, shard_align=align
    )
    owned: list[list[int]] = [[] for _ in numels]
    for rank in range(world):
        for elements, ranges in zip(owned, layout.ranges(rank), strict=True):
            for part in ranges:
                lengths = {end - start for start, end in (part.world, part.local, part.param)}
                assert len(lengths) == 1 and lengths.pop() > 0
                start, _ = layout.shard(part.bucket, rank)
                assert part.world[0] - part.local[0] == start
                elements.extend(range(*part.param))
    assert [sorted(elements) for elements in owned] == [list(range(numel)) for numel in numels]
    assert layout.numel == sum(end - start for start, end in layout.buckets)
    for start, end in layout.buckets:
        assert start < end or not sum(numels)
        assert (end - start) % world == 0 and end % align == 0
    for start, end in layout.params:
        assert start % align == 0 and any(
            low <= start <= end <= high for low, high in layout.buckets
        )


def test_buckets_close_once_they_are_full():
    layout = buffer_layout([10, 10, 10, 5], 2, bucket_numel=12)
    assert layout.buckets == ((0, 16), (16, 36))
    assert layout.bucket_used == (15, 20)
    assert layout.bucket_of == (1, 1, 0, 0)


@pytest.mark.parametrize("bucket_numel", [None, 12, 100])
def test_a_parameter_alone_is_cut_like_any_other_of_its_size(bucket_numel: int | None):
    sizes = [([50, 10, 7], 0), ([10, 3, 50], 2), ([10, 50, 10], 1)]
    options = {"bucket_numel": bucket_numel, "param_align": 4, "shard_align": 4}
    layouts = [(buffer_layout(numels, 3, **options, alone=[at]), at) for numels, at in sizes]
    for layout, place in layouts:
        bucket = layout.bucket_of[place]
        assert layout.bucket_of.count(bucket) == 1 and layout.bucket_used[bucket] == 50
        assert layout.params[place][0] == layout.buckets[bucket][0]
    for rank in range(3):
        parts = [layout.ranges(rank)[place][0] for layout, place in layouts]
        assert len({(part.local, part.param) for part in parts}) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([1], 0, 0), "world=0 must be at least 1"),
        (([1], 2, 2), "rank 2 is outside the 2 ranks"),
        (([1], 2, -1), "rank -1 is outside the 2 ranks"),
        (([3, -1], 2, 0), "cannot have -1 elements"),
    ],
)
def test_refuses_impossible_numbers(args: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        shard_map(*args)
    with pytest.raises(ValueError, match="bucket_numel=0"):
        shard_map([1], 1, 0, bucket_numel=0)
