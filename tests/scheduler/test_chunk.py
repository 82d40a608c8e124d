from hypothesis import given
from hypothesis import strategies as st

from schedules import Times, chunks, ids, make_request, make_scheduler, run_step
from twinphase.batch import StepWork
from twinphase.scheduler.chunk import MAX_UNUSED_SHARE, ChunkBudget
from twinphase.scheduler.pace import Pace

DECODES = StepWork(rows=3, decode_contexts=30, logits=3, sequences=3)


def make_budget(num_tokens, limit, decodes=DECODES, times=None, block_size=4):
    return ChunkBudget(num_tokens, decodes, times or Times(), Pace(limit), block_size)


def test_without_an_slo_a_chunk_fills_the_budget():
    budget = make_budget(64, None)
    assert [budget.take(0, 40), budget.take(0, 40), budget.num_tokens] == [40, 24, 0]


def test_an_slo_cuts_the_chunk():
    # Three decodes and a chunk of 16 take 19 seconds; 17 would fit, but end inside a block.
    assert make_budget(64, 20.0).take(0, 40) == 16
    assert make_budget(64, 20.0).take(0, 17) == 17
    # From token 2 on the last boundary within 17 tokens would waste 3 of them.
    assert make_budget(64, 20.0).take(2, 40) == 17
    assert make_budget(64, 20.0).take(3, 40) == 17


def test_a_short_chunk_uses_the_time_that_the_pace_allows():
    budget = make_budget(64, 10.0)
    assert [budget.take(0, 40), budget.take(0, 40)] == [7, 0]
    # The other requests' chunks of the step end on boundaries.
    budget = make_budget(64, 14.0)
    assert [budget.take(0, 2), budget.take(0, 40), budget.take(0, 40)] == [2, 8, 0]


def test_where_nothing_decodes_nobody_waits_for_a_token():
    assert make_budget(64, 1e-9, decodes=StepWork()).take(0, 40) == 40


def test_the_first_chunk_is_never_starved_and_the_second_is():
    budget = make_budget(64, 1.0)
    assert budget.take(0, 40) == 4
    assert budget.take(0, 40) == 0
    assert make_budget(2, 1.0).take(0, 40) == 2


def test_a_rest_that_ends_no_block_is_no_chunk():
    budget = make_budget(10, None)
    # All of it; up to the block's end; nothing, since one token is left and the block needs two.
    assert [budget.take(0, 7), budget.take(2, 40), budget.take(2, 40), budget.num_tokens] == [
        7,
        2,
        0,
        1,
    ]


@given(
    num_tokens=st.integers(1, 100),
    limit=st.floats(0, 80),
    start=st.integers(0, 50),
    remaining=st.integers(1, 100),
    block_size=st.integers(1, 8),
    row=st.floats(0.1, 3),
)
def test_it_is_the_largest_that_fits(num_tokens, limit, start, remaining, block_size, row):
    times = Times(row)
    taken = make_budget(num_tokens, limit, times=times, block_size=block_size).take(
        start, remaining
    )
    most = min(num_tokens, remaining)

    def fits(count):
        return (
            times.seconds(DECODES.plus(StepWork.of_chunk(start, count, count == remaining)))
            <= limit
        )

    largest = max((count for count in range(1, most + 1) if fits(count)), default=0)
    wanted = max(largest, min(block_size, most))
    on_boundary = [n for n in range(1, wanted + 1) if (start + n) % block_size == 0]
    if wanted == remaining or not on_boundary:
        assert taken == wanted
    else:
        is_cut_by_time = wanted < most
        unused = wanted - on_boundary[-1]
        assert taken == (
            wanted if is_cut_by_time and unused > MAX_UNUSED_SHARE * wanted else on_boundary[-1]
        )


def test_a_long_prompt_keeps_decodes_within_the_slo():
    """The automatic chunk has as many tokens per step as the decodes' SLO allows."""
    scheduler = make_scheduler(
        times=Times(row=1e-3, step=5e-3), pace=Pace(0.02), max_num_batched_tokens=64
    )
    scheduler.add(make_request("a", 3, max_tokens=50))
    scheduler.add(make_request("b", 3, max_tokens=50))
    run_step(scheduler)
    scheduler.add(make_request("long", 60, max_tokens=1))
    taken = []
    while not taken or sum(taken) < 60:
        batch, _ = run_step(scheduler)
        assert ids(batch.decodes) == ["a", "b"]
        taken += [count for _, _, count in chunks(batch)]
    assert taken == [12] * 5  # 5 ms + 2 + 12 rows of 1 ms each: a block more would be too late


def test_no_prompt_starves_under_an_slo_that_cannot_be_met():
    scheduler = make_scheduler(pace=Pace(0.001), max_num_batched_tokens=64)
    scheduler.add(make_request("a", 3, max_tokens=90))
    run_step(scheduler)
    requests = [make_request(name, 20, max_tokens=1) for name in ("long", "other")]
    for request in requests:
        scheduler.add(request)
    for _ in range(2 * 5 - 1):
        run_step(scheduler)
    assert [request.num_computed_tokens for request in requests] == [0, 16]
    assert requests[0].finish_reason is not None


def test_what_an_slo_holds_back_is_said():
    scheduler = make_scheduler(pace=Pace(0.001))
    scheduler.add(make_request("a", 3))
    run_step(scheduler)
    scheduler.add(make_request("b", 20))
    scheduler.add(make_request("c", 20))
    assert run_step(scheduler)[0].held_back == "budget"
