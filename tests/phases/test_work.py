from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from twinphase.batch import Batch, Phase, ScheduledRequest, StepWork
from twinphase.phases.work import (
    Cost,
    ModelShape,
    kv_bytes_per_token,
    rows_cost,
    step_cost,
    weight_bytes_read,
)
from twinphase.request import SamplingParams

# SmolLM2-135M in Q4_0.
SHAPE = ModelShape(
    linear_parameters=106_168_320,
    head_parameters=49152 * 576,
    linear_bytes=106_168_320 * 18 // 32,
    head_bytes=49152 * 576 * 34 // 32,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
)


def test_kv_bytes_per_token():
    assert kv_bytes_per_token(SHAPE) == 2 * 30 * 3 * 64 * 2 == 23_040
    assert (
        kv_bytes_per_token(replace(SHAPE, kv_token_bytes=17_000)) == 17_000
    )  # what the backend says it stores


def test_a_prompt_by_hand():
    cost = rows_cost(SHAPE, 0, 512, 1)
    attention = 4 * 30 * 9 * 64 * (512 * 513 // 2)
    assert cost == Cost(2 * 106_168_320 * 512 + 2 * 49152 * 576, attention, 512 * 23_040)
    assert cost.flops == cost.linear_flops + attention


def test_a_decode_step_by_hand():
    cost = rows_cost(SHAPE, 4096, 1, 1)
    assert cost == Cost(2 * 106_168_320 + 2 * 49152 * 576, 4 * 30 * 9 * 64 * 4097, 4097 * 23_040)


def test_weights_are_read_once_and_the_head_only_for_logits():
    assert weight_bytes_read(SHAPE, 5, 0) == SHAPE.linear_bytes
    assert (
        weight_bytes_read(SHAPE, 1, 1)
        == weight_bytes_read(SHAPE, 99, 7)
        == SHAPE.linear_bytes + SHAPE.head_bytes
    )


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_chunking_does_not_change_the_operations(chunks):
    start = 0
    total = Cost()
    for chunk in chunks:
        total += rows_cost(SHAPE, start, chunk, 0)
        start += chunk
    assert total.flops == rows_cost(SHAPE, 0, start, 0).flops


def test_the_work_of_a_batch_is_the_sum_of_its_shares():
    params = SamplingParams()
    decodes = [
        ScheduledRequest("d", Phase.DECODE, [1], start, [], True, params) for start in (4, 9)
    ]
    prefills = [
        ScheduledRequest("p", Phase.PREFILL, [1] * 3, 5, [], samples, params)
        for samples in (True, False)
    ]
    batch = Batch(decodes, prefills)
    assert batch.decode_work == StepWork(2, 0, 5 + 10, 2, 2, kv_tokens=15)
    assert batch.prefill_work == StepWork(6, 2 * (6 + 7 + 8), 0, 1, 2, kv_tokens=16)
    assert batch.work == batch.decode_work.plus(batch.prefill_work)
    assert (batch.num_tokens, Batch([], []).num_tokens) == (8, 0)
    cost = step_cost(SHAPE, batch.work)
    parts = [
        rows_cost(SHAPE, 4, 1, 1),
        rows_cost(SHAPE, 9, 1, 1),
        rows_cost(SHAPE, 5, 3, 1),
        rows_cost(SHAPE, 5, 3, 0),
    ]
    assert cost == sum(parts, Cost())


# Windows: 2 of 6 layers attend to everything, 4 to 100 tokens.
WINDOWED = replace(SHAPE, num_layers=6, window=100, windowed_layers=4, kv_token_bytes=6 * 1000)


def test_a_windowed_decode_step_by_hand():
    cost = rows_cost(WINDOWED, 4096, 1, 1)
    assert cost.attention_flops == 4 * 9 * 64 * (2 * 4097 + 4 * 100)
    assert cost.bytes == 1000 * (2 * 4097 + 4 * 100)
    assert rows_cost(WINDOWED, 49, 1, 1).bytes == 6 * 1000 * 50  # the window is not full yet


def test_a_windowed_chunk_by_hand():
    """Of the rows 90 to 109, ten attend to all tokens, and ten to 100 tokens, from token 10 on."""
    cost = rows_cost(WINDOWED, 90, 20, 0)
    whole = sum(range(91, 111))
    near = sum(range(91, 101)) + 10 * 100
    assert cost.attention_flops == 4 * 9 * 64 * (2 * whole + 4 * near)
    assert cost.bytes == 1000 * (2 * 110 + 4 * 110)
    assert rows_cost(WINDOWED, 110, 20, 0).bytes == 1000 * (2 * 130 + 4 * 119)  # tokens 11 .. 129


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.booleans()), max_size=5),
    st.lists(st.one_of(st.none(), st.just(17)), min_size=1, max_size=4),
)
def test_windowed_work_is_the_sum_over_rows_and_layers_written_out(shares, windows):
    """FLOP by each row's own context, bytes by the tokens that a sequence's rows attend to."""
    window = max((one for one in windows if one), default=None)
    near = sum(one is not None for one in windows)
    each = 2 * 3 * 64 * 2  # bytes of a token's keys and values in a layer
    shape = replace(SHAPE, num_layers=len(windows), window=window, windowed_layers=near)
    decodes = [
        ScheduledRequest("d", Phase.DECODE, [1], at, [], True, SamplingParams())
        for at, _, one in shares
        if one
    ]
    prefills = [
        ScheduledRequest("p", Phase.PREFILL, [1] * count, at, [], False, SamplingParams())
        for at, count, one in shares
        if not one
    ]
    cost = step_cost(shape, Batch(decodes, prefills, window=window).work)
    flops = nbytes = 0
    for share in decodes + prefills:
        for own in windows:
            seen = set()
            for position in range(
                share.num_computed_tokens, share.num_computed_tokens + len(share.token_ids)
            ):
                attended = range(max(0, position + 1 - (own or 10**9)), position + 1)
                flops += 4 * 9 * 64 * len(attended)
                seen |= set(attended)
            nbytes += each * len(seen)
    assert (cost.attention_flops, cost.bytes) == (flops, nbytes)


def test_experts_are_read_as_far_as_rows_reach_them():
    shape = replace(
        SHAPE, num_experts=8, experts_per_row=2, expert_bytes=8_000_000, head_expert_bytes=800_000
    )
    dense = SHAPE.linear_bytes + SHAPE.head_bytes
    assert weight_bytes_read(shape, 1, 1) == dense + 2_000_000 + 200_000
    assert weight_bytes_read(shape, 2, 0) == SHAPE.linear_bytes + 3_500_000  # 1 - (6 / 8)^2 of them
    assert weight_bytes_read(shape, 512, 1) == dense + 8_000_000 + 200_000
    assert shape.weight_bytes == dense + 8_800_000


def test_a_mean_context_stops_growing_in_windows():
    assert SHAPE.mean_attended(500) == 500
    assert WINDOWED.mean_attended(80) == 80
    assert abs(WINDOWED.mean_attended(1000) - (2 * 1000 + 4 * 100) / 6) < 1e-9
