"""The arithmetic of `estimate/estimate.py`: against sums written out, and against the textbook."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinphase.backends.base import Units
from twinphase.errors import InvalidRequestError
from twinphase.estimate.estimate import Estimate, assumptions, estimate, warnings
from twinphase.estimate.inputs import (
    Drafting,
    Hardware,
    Scenario,
    bytes_per_weight,
    datasheet_hardware,
    units_for,
    weight_bytes,
)
from twinphase.estimate.known_models import read_shape
from twinphase.estimate.shapes import DecoderShape
from twinphase.phases.hardware import Ceilings

LLAMA = read_shape("llama-2-7b")
A100 = datasheet_hardware("a100-80gb-sxm")
ROUND = Hardware("round", "given", {"fp16": 100e12}, 1e12, 100e9)


def scenario(prompt: int = 1000, output: int = 200, batch: int = 1, **more: object) -> Scenario:
    fields = {
        "units": Units("fp16", "fp16", "fp16"),
        "dtype": "fp16",
        "kv_head_bytes": 2 * 128 * 2.0,
    } | more
    return Scenario(prompt_tokens=prompt, output_tokens=output, batch_size=batch, **fields)


def on_a100(model: str, prompt: int, output: int = 200, batch: int = 1, **more: object) -> Estimate:
    return estimate(read_shape(model), A100, scenario(prompt, output, batch, **more))


def prefill_rate(result: Estimate) -> float:
    assert result.prefill.seconds is not None
    return result.scenario.prompt_tokens / result.prefill.seconds


def decode_rate(result: Estimate) -> float:
    assert result.decode.seconds is not None
    return 1 / result.decode.seconds


# Counts


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3-8b", "smollm2-135m", "qwen2.5-7b"])
@pytest.mark.parametrize(("prompt", "batch"), [(1, 1), (18, 3), (4001, 64)])
def test_counts_are_those_of_the_textbook(model, prompt, batch):
    shape = read_shape(model)
    n = prompt
    b = shape.blueprint
    p = shape.parameters.layers
    head = shape.blueprint.vocab_size * shape.blueprint.hidden_size
    each = 2 * b.num_layers * b.num_kv_heads * b.head_dim * 2
    result = estimate(shape, ROUND, scenario(n, 2, batch, kv_head_bytes=2 * b.head_dim * 2.0))
    assert result.prefill.linear.flops == 2 * p * n + 2 * head
    assert (
        result.prefill.attention.flops
        == 4 * b.num_layers * b.num_heads * b.head_dim * n * (n + 1) // 2
    )
    assert result.prefill.bytes == 2 * (p + head) + n * each
    assert result.decode.linear.flops == 2 * (p + head) * batch
    assert (
        result.decode.attention.flops
        == 4 * b.num_layers * b.num_heads * b.head_dim * (n + 1) * batch
    )
    assert result.decode.bytes == 2 * (p + head) + batch * (n + 1) * each
    assert result.kv_token_bytes == each


@pytest.mark.parametrize("batch", [1, 7])
def test_drafts_are_rows_that_read_the_kv_once(batch):
    result = estimate(LLAMA, ROUND, scenario(500, 2, batch), Drafting(3, 0.5))
    plain = estimate(LLAMA, ROUND, scenario(500, 2, batch))
    wide = estimate(LLAMA, ROUND, scenario(500, 2, 4 * batch))
    assert result.speculation is not None and plain.speculation is None
    step = result.speculation.step
    assert step.linear == replace(wide.decode.linear, memory_seconds=step.linear.memory_seconds)
    assert step.attention.flops == wide.decode.attention.flops
    assert step.attention.bytes == plain.decode.attention.bytes
    assert result.speculation.drafting.tokens_per_step == 1 + 0.5 + 0.25 + 0.125
    assert result.decode == plain.decode


def with_windows(*windows: int | None) -> DecoderShape:
    return replace(
        LLAMA, blueprint=replace(LLAMA.blueprint, num_layers=len(windows), windows=windows)
    )


@given(
    st.integers(1, 60),
    st.integers(2, 60),
    st.lists(st.sampled_from([None, 9]), min_size=1, max_size=3),
)
def test_attended_tokens_are_the_sum_written_out(prompt, output, windows):
    def attended(positions: range) -> int:
        return sum(
            min(position + 1, window or position + 1)
            for position in positions
            for window in windows
        )

    result = estimate(with_windows(*windows), ROUND, scenario(prompt, output))
    assert result.prefill.attention.flops == 4 * 32 * 128 * attended(range(prompt))
    steps = range(prompt, prompt + output - 1)
    assert result.decode.attention.flops == pytest.approx(
        4 * 32 * 128 * attended(steps) / len(steps)
    )
    assert result.decode.attention.bytes == pytest.approx(
        32 * 2 * 128 * 2 * attended(steps) / len(steps)
    )


def test_a_layer_with_a_window_reads_it_and_holds_everything():
    result = estimate(with_windows(None, 100), ROUND, scenario(1000, 1))
    token = 32 * 2 * 128 * 2  # of one layer
    assert result.sequence_bytes == 1000 * 2 * token
    assert result.decode_last.attention.bytes == (1001 + 100) * token
    assert any("window" in line for line in assumptions(result))
    assert not any("window" in line for line in assumptions(on_a100("llama-2-7b", 10)))


@pytest.mark.parametrize(("rows", "reached"), [(1, 2 / 8), (2, 1 - (6 / 8) ** 2), (1000, 1.0)])
def test_rows_reach_experts(rows, reached):
    mixtral = read_shape("mixtral-8x7b")
    result = estimate(mixtral, A100, scenario(10, 2, rows))
    size = mixtral.parameters
    dense = 2 * (size.layers + size.head)
    assert result.decode.linear.bytes == pytest.approx(dense + 2 * size.experts * reached)
    assert result.decode.linear.flops == 2 * rows * (
        size.layers + size.experts * 2 // 8 + size.head
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("fp16", 2), ("FP32", 4), ("int4", 0.5), ("Q4_0", 18 / 32), ("q6_k", 210 / 256)],
)
def test_bytes_of_a_weight(dtype, expected):
    assert bytes_per_weight(dtype) == expected


def test_the_mean_of_steps_is_the_mean_of_each():
    whole = on_a100("llama-2-7b", 100, output=5)
    steps = [on_a100("llama-2-7b", 100 + i, output=2).decode for i in range(4)]
    assert whole.decode_steps == 4
    assert whole.decode.seconds == pytest.approx(sum(step.seconds or 0 for step in steps) / 4)
    assert whole.decode_first.seconds == pytest.approx(steps[0].seconds)
    assert whole.decode_last.seconds == pytest.approx(steps[-1].seconds)


# What follows


def test_break_even_is_the_first_batch_bound_by_compute():
    for model in ("llama-2-7b", "mixtral-8x7b"):
        batch = on_a100(model, 10).break_even_batch
        assert batch is not None
        assert on_a100(model, 10, batch=batch).decode.linear.bound == "compute"
        assert on_a100(model, 10, batch=batch - 1).decode.linear.bound == "memory"


def test_no_break_even_is_never_where_everything_is_known():
    result = estimate(LLAMA, replace(ROUND, peaks={"fp16": 1e30}), scenario())
    assert result.break_even_batch is None
    assert result.no_break_even.startswith("never: even with 16,777,216 requests")
    blind = estimate(LLAMA, replace(ROUND, bandwidth=None), scenario())
    assert blind.no_break_even == "unknown: no memory bandwidth is known"
    assert on_a100("llama-2-7b", 10).no_break_even == ""


def test_largest_batch_fills_the_memory():
    result = on_a100("llama-2-7b", 1000)
    assert result.max_batch is not None
    free = 80e9 - result.weights.total
    assert (
        result.max_batch * result.sequence_bytes
        <= free
        < (result.max_batch + 1) * result.sequence_bytes
    )


def test_weights_that_do_not_fit_leave_no_batch():
    assert on_a100("llama-2-70b", 1000).max_batch == 0
    two = estimate(read_shape("llama-2-70b"), replace(A100, devices=2), scenario())
    assert two.max_batch is not None and two.max_batch > 0


def test_a_batch_beyond_the_memory_and_a_context_beyond_the_model_are_named():
    found = " ".join(warnings(on_a100("llama-2-7b", 10_000, batch=50)))
    assert "A batch of 50 does not fit" in found
    assert "beyond the context of 4,096" in found


def test_costs():
    result = on_a100("llama-2-7b", 1000, batch=8, price_per_hour=3.6)
    assert result.prefill_cost == pytest.approx(0.001 * 1e6 / prefill_rate(result))
    assert result.decode_cost == pytest.approx(0.001 * 1e6 / (8 * decode_rate(result)))
    assert on_a100("llama-2-7b", 1000).prefill_cost is None


def test_efficiencies_stretch_what_they_limit():
    plain = on_a100("llama-2-7b", 1000)
    half = on_a100("llama-2-7b", 1000, mfu=0.5, mbu=0.25)
    assert half.prefill.seconds == pytest.approx(2 * (plain.prefill.seconds or 0))
    assert half.decode.seconds == pytest.approx(4 * (plain.decode.seconds or 0))


def test_devices_divide_the_time():
    one = on_a100("llama-2-7b", 1000)
    four = estimate(LLAMA, replace(A100, devices=4), scenario())
    assert four.prefill.seconds == pytest.approx((one.prefill.seconds or 0) / 4)
    assert four.decode.seconds == pytest.approx((one.decode.seconds or 0) / 4)
    assert four.balance == pytest.approx(one.balance)


def test_one_output_token_is_all_prefill():
    result = on_a100("llama-2-7b", 1000, output=1)
    assert (result.decode_steps, result.prefill_share) == (0, 1.0)


# The unknown stays unknown


def test_without_a_peak_times_are_unknown_and_memory_still_bounds():
    result = estimate(LLAMA, replace(ROUND, peaks={}), scenario())
    assert result.prefill.seconds is result.decode.seconds is result.prefill_share is None
    assert result.break_even_batch is result.balance is None
    assert result.no_break_even == "unknown: no peak in fp16 is known"
    assert result.decode.bound == result.decode.linear.bound == "unknown"
    assert result.decode.memory_seconds == pytest.approx(result.decode.bytes / 1e12)
    assert "No fp16 peak" in " ".join(warnings(result))


def test_without_bandwidth_or_memory():
    result = estimate(
        LLAMA, replace(ROUND, bandwidth=None, memory=None), scenario(price_per_hour=1.0)
    )
    assert result.decode.memory_seconds is result.decode_cost is result.max_batch is None
    assert "bandwidth" in " ".join(warnings(result))


def test_measured_ceilings_choose_units_and_bandwidth_by_working_set():
    points = ((10**6, 100e9), (10**8, 50e9))
    ceilings = Ceilings(
        "a processor", 2, "avx2", points, int8_ops=1e12, float32_flops=2e11, bfloat16_flops=None
    )
    here = Hardware("here", "measured here", {}, None, 1e9, ceilings=ceilings)
    assert (here.peak("int8"), here.peak("fp32"), here.peak("bf16"), here.peak("fp16")) == (
        1e12,
        2e11,
        None,
        None,
    )
    shape = read_shape("smollm2-135m")
    units = Units("int8", "int8", "fp32")
    result = estimate(shape, here, scenario(units=units, dtype="Q4_0", kv_head_bytes=196.0))
    attention = result.prefill.attention
    assert attention.compute_seconds == pytest.approx(
        attention.flops / 2 / 1e12 + attention.flops / 2 / 2e11
    )
    assert result.decode.linear.memory_seconds == pytest.approx(
        result.decode.linear.bytes / (ceilings.read_bandwidth(result.decode.bytes) or 0)
    )


def test_weights_stored_in_an_unknown_way_are_refused():
    with pytest.raises(InvalidRequestError, match="--dtype"):
        weight_bytes(replace(LLAMA, dtype=""), "")


@pytest.mark.parametrize(
    ("dtype", "linear", "attention"),
    [
        ("fp16", "fp16", "fp16"),
        ("F16", "fp16", "fp16"),
        ("F32", "fp32", "fp32"),
        ("fp8", "fp8", "bf16"),
    ]
    + [("int4", "bf16", "bf16"), ("Q4_K", "bf16", "bf16")],
)
def test_precision_of_the_arithmetic(dtype, linear, attention):
    assert units_for(dtype) == Units(linear, attention, attention)


# The figures that everyone quotes, and what they presuppose (docs/estimate.md)


def test_balance_point_of_the_a100():
    assert on_a100("llama-2-7b", 1000).balance == pytest.approx(153, abs=0.5)


def test_a_7b_in_fp16_decodes_no_faster_than_145_to_150_a_second():
    """At short prompts a little more, 154 with no context at all."""
    result = on_a100("llama-2-7b", 1000)
    assert 145 < decode_rate(result) < 150
    assert result.decode.bound == "memory" and result.decode.linear.intensity == pytest.approx(1)
    assert 150 < decode_rate(on_a100("llama-2-7b", 1, output=2)) < 155


@pytest.mark.parametrize(("mbu", "rate"), [(0.68, 100), (0.88, 130)])
def test_in_practice_100_to_130_is_an_mbu_of_68_to_88_percent(mbu, rate):
    assert decode_rate(on_a100("llama-2-7b", 1000, mbu=mbu)) == pytest.approx(rate, rel=0.01)


def test_prefill_is_more_than_100_times_as_fast_a_token():
    result = on_a100("llama-2-7b", 1000)
    assert result.prefill.bound == "compute"
    assert 100 < prefill_rate(result) / decode_rate(result) < 200


@pytest.mark.parametrize(
    ("model", "prompt", "mfu", "mbu", "share", "within"),
    [
        ("llama-2-7b", 1000, 1.0, 1.0, 0.03, 0.005),
        ("llama-2-7b", 1000, 0.25, 0.8, 0.09, 0.005),  # 10 %, where prefill is the less efficient
        ("llama-3-8b", 100_000, 1.0, 1.0, 0.82, 0.01),  # 80 % with grouped queries
        ("llama-2-7b", 100_000, 1.0, 1.0, 0.66, 0.01),  # two thirds without
        ("llama-2-7b", 100_000, 0.5, 0.8, 0.76, 0.01),
        (
            "llama-2-7b",
            100_000,
            0.25,
            0.8,
            0.86,
            0.01,
        ),  # the 10 % and the 80 % need different efficiencies
        ("llama-3-8b", 100_000, 0.25, 0.8, 0.94, 0.01),
    ],
)
def test_share_of_prefill(model, prompt, mfu, mbu, share, within):
    assert on_a100(model, prompt, mfu=mfu, mbu=mbu).prefill_share == pytest.approx(
        share, abs=within
    )


def test_10_percent_and_100_times_exclude_each_other():
    """With 1,000 tokens in 10 % and 199 steps in 90 %, rates differ 45 times."""
    plain = on_a100("llama-2-7b", 1000)
    assert plain.prefill.seconds is not None and plain.decode_seconds is not None
    for mbu in (0.6, 0.8, 1.0):
        result = on_a100(
            "llama-2-7b", 1000, mbu=mbu, mfu=mbu * plain.prefill.seconds * 9 / plain.decode_seconds
        )
        assert result.prefill_share == pytest.approx(0.1)
        assert prefill_rate(result) / decode_rate(result) == pytest.approx(45, abs=0.5)


def test_a_processor_with_a_lower_balance_point_spends_more_on_prefill():
    units = Units("fp32", "fp32", "fp32")
    result = estimate(LLAMA, datasheet_hardware("epyc-9654"), scenario(units=units))
    assert result.balance == pytest.approx(16, abs=0.1)
    assert result.prefill_share == pytest.approx(0.23, abs=0.005)
