from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from twinphase.batch import Batch, Phase, ScheduledRequest, StepWork
from twinphase.phases.work import Cost, ModelShape, kv_bytes_per_token, rows_cost, step_cost, weight_bytes_read
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
    assert kv_bytes_per_token(replace(SHAPE, kv_token_bytes=17_000)) == 17_000  # what the backend says it stores


def test_a_prompt_by_hand():
    cost = rows_cost(SHAPE, 0, 512, 1)
    attention = 4 * 30 * 9 * 64 * (512 * 513 // 2)
    assert cost == Cost(2 * 106_168_320 * 512 + 2 * 49152 * 576, attention, 512 * 23_040)
    assert cost.flops == cost.linear_flops + attention


def test_a_decode_step_by_hand():
    cost = rows_cost(SHAPE, 4096, 1, 1)
    assert cost == Cost(2 * 106_168_320 + 2 * 49152 * 576, 4 * 30 * 9 * 64 * 4097, 4097 * 23_040)


def test_weights_are_read_once_and_the_head_only_for_logits():
    assert weight_bytes_read(SHAPE, 0) == SHAPE.linear_bytes
    assert weight_bytes_read(SHAPE, 1) == weight_bytes_read(SHAPE, 7) == SHAPE.linear_bytes + SHAPE.head_bytes


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_chunking_does_not_change_the_operations(chunks):
    start, total = 0, Cost()
    for chunk in chunks:
        total += rows_cost(SHAPE, start, chunk, 0)
        start += chunk
    assert total.flops == rows_cost(SHAPE, 0, start, 0).flops


def test_the_work_of_a_batch_is_the_sum_of_its_shares():
    params = SamplingParams()
    decodes = [ScheduledRequest("d", Phase.DECODE, [1], start, [], True, params) for start in (4, 9)]
    prefills = [ScheduledRequest("p", Phase.PREFILL, [1] * 3, 5, [], samples, params) for samples in (True, False)]
    batch = Batch(decodes, prefills)
    assert batch.decode_work == StepWork(2, 0, 5 + 10, 2, 2)
    assert batch.prefill_work == StepWork(6, 2 * (6 + 7 + 8), 0, 1, 2)
    assert batch.work == batch.decode_work.plus(batch.prefill_work)
    assert (batch.num_tokens, Batch([], []).num_tokens) == (8, 0)
    cost = step_cost(SHAPE, batch.work, 5 + 10 + 8 + 8)
    parts = [rows_cost(SHAPE, 4, 1, 1), rows_cost(SHAPE, 9, 1, 1), rows_cost(SHAPE, 5, 3, 1), rows_cost(SHAPE, 5, 3, 0)]
    assert cost == sum(parts, Cost())
