from hypothesis import given
from hypothesis import strategies as st

from twinphase.phases.work import Cost, ModelShape, kv_bytes_per_token, rows_cost, weight_bytes_read

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


def test_a_prompt_by_hand():
    cost = rows_cost(SHAPE, 0, 512, 1)
    attention = 4 * 30 * 9 * 64 * (512 * 513 // 2)
    assert cost == Cost(2 * 106_168_320 * 512 + attention + 2 * 49152 * 576, 512 * 23_040)


def test_a_decode_step_by_hand():
    cost = rows_cost(SHAPE, 4096, 1, 1)
    assert cost == Cost(2 * 106_168_320 + 4 * 30 * 9 * 64 * 4097 + 2 * 49152 * 576, 4097 * 23_040)


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
