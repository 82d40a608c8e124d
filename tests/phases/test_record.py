"""A request's record: its states, its copies, and its line in a log."""

import pytest

from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord, RequestState
from twinphase.phases.timeline import IntervalKind
from twinphase.request import Request, SamplingParams

CHAINS = [
    ["queued", "decoding", "ended"],
    ["queued", "prefilling", "queued", "prefilling", "decoding", "queued", "decoding", "ended"],
    ["queued", "prefilling", "transferring", "queued", "prefilling", "decoding"],
    ["queued", "queued", "prefilling", "prefilling", "ended"],
    ["ended"],
]
ILLEGAL = [
    ["prefilling"],
    ["decoding"],
    ["queued", "tokenizing"],
    ["queued", "transferring"],
    ["queued", "decoding", "prefilling"],
    ["queued", "decoding", "transferring"],
    ["queued", "prefilling", "transferring", "decoding"],
    ["ended", "ended"],
    ["ended", "queued"],
]


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_a_request_goes_through_legal_states(chain):
    record = RequestRecord.arrived("a", 1.0)
    for state in chain:
        record.move_to(RequestState(state))
        assert record.state == state


@pytest.mark.parametrize("chain", ILLEGAL, ids="-".join)
def test_an_illegal_state_is_refused_and_changes_nothing(chain):
    record = RequestRecord.arrived("a", 1.0)
    for state in chain[:-1]:
        record.move_to(RequestState(state))
    before = record.state
    with pytest.raises(ValueError, match=f"request a cannot go from {before} to {chain[-1]}"):
        record.move_to(RequestState(chain[-1]))
    assert record.state is before


def test_a_copy_lives_on_its_own():
    record = RequestRecord.arrived("a", 1.0)
    copy = record.copy()
    assert copy == record
    record.tokenized(7, 1.5)
    record.counts.draft_steps.append((2, 1))
    assert (copy.state, copy.counts.num_prompt_tokens, copy.timeline.end) == ("tokenizing", 0, 1.0)
    assert copy.counts.draft_steps == []


def test_a_request_that_another_worker_continues_counts_the_tokens_it_has():
    params = SamplingParams(temperature=0.0)
    assert Request("a", [1, 2], params, output_token_ids=[3, 4, 5]).counts.num_output_tokens == 3


def test_a_record_prints_as_one_line():
    record = RequestRecord.arrived("a", 1.0)
    record.tokenized(1200, 1.002)
    assert str(record) == (
        "a queued, 1,200 prompt tokens (0 cached), 0 output tokens: tokenize 2.0 ms"
    )
    record.tenant = "team"
    record.counts.num_cached_tokens = 64
    record.counts.num_output_tokens = 3
    record.counts.num_preemptions = 1
    record.counts.error = "RuntimeError: no such luck"
    record.timeline.mark(IntervalKind.PREFILL, 1.1)
    record.end(FinishReason.ERROR)
    assert str(record) == (
        "a ended (error), tenant team, 1,200 prompt tokens (64 cached), 3 output tokens, "
        "1 preemptions, error: RuntimeError: no such luck: tokenize 2.0 ms, prefill 98.0 ms"
    )
