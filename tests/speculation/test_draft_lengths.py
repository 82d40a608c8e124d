"""Draft lengths: the most tokens per second, also by brute force; and learned rates."""

import itertools
import random

import pytest

from twinphase.batch import Batch, Phase, ScheduledRequest, StepOutput, StepWork
from twinphase.request import Request, SamplingParams
from twinphase.speculation import speculator
from twinphase.speculation.draft_lengths import (
    MIN_GAIN_RATIO,
    ROW_OVERHEAD_SECONDS,
    Acceptance,
    choose_lengths,
)
from twinphase.speculation.proposer import Draft
from twinphase.speculation.speculator import (
    BACKOFF_AFTER_MISSES,
    BACKOFF_NEW_REQUESTS_AFTER,
    Speculator,
)


class Times:
    """A step costs 1 s and each row some seconds."""

    window = None

    def __init__(self, row):
        self.row = row

    def seconds(self, work):
        return 1.0 + self.row * work.rows

    def step_limit(self, slo_seconds):
        return slo_seconds


class Known(Acceptance):
    """Given acceptance probabilities."""

    def __init__(self, chances):
        super().__init__()
        self.chances = chances

    def probability(self, request_id, draft, position):
        return self.chances[request_id][position]


def decodes(count):
    return StepWork.of_decodes(count, 100)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_gives_more_tokens_per_second(seed):
    choose = random.Random(seed)
    row = random.Random(seed).choice([0.001, 0.05, 0.2, 0.5, 2.0])
    chances = {name: sorted((choose.random() for _ in range(3)), reverse=True) for name in "abc"}
    drafts = {name: Draft("x", [1, 2, 3]) for name in "abc"}
    times = Times(row)
    contexts = dict.fromkeys("abc", 100)
    chosen = choose_lengths(drafts, contexts, decodes(3), times, Known(chances))

    def rate(lengths):
        tokens = 3.0
        rows = 3
        for name, length in zip("abc", lengths, strict=True):
            survives = 1.0
            for position in range(length):
                survives *= chances[name][position]
                tokens += survives
                rows += 1
        return tokens / (times.seconds(decodes(rows)) + (rows - 3) * ROW_OVERHEAD_SECONDS)

    best = max(rate(lengths) for lengths in itertools.product(range(4), repeat=3))
    got = rate([chosen.get(name, 0) for name in "abc"])
    assert got >= rate((0, 0, 0))
    assert got >= best / MIN_GAIN_RATIO  # a row has to bring a little more than it costs


def test_a_free_row_is_always_taken_and_an_expensive_one_never():
    drafts = {"a": Draft("x", [1] * 9, certain=9)}
    contexts = {"a": 50}
    assert choose_lengths(drafts, contexts, decodes(1), Times(0.0), Acceptance()) == {"a": 9}
    assert choose_lengths(drafts, contexts, decodes(40), Times(5.0), Acceptance()) == {}


def test_no_step_gets_longer_than_the_limit():
    drafts = {"a": Draft("x", [1] * 9, certain=9)}
    contexts = {"a": 50}
    lengths = choose_lengths(drafts, contexts, decodes(1), Times(0.01), Acceptance(), limit=1.045)
    assert lengths == {"a": 3}


def test_there_is_no_cliff_at_a_number_of_requests():
    """The drafts' length falls row by row as a step fills, since each row costs more of it."""
    times = Times(0.05)
    rows = []
    for count in range(1, 40):
        names = [str(number) for number in range(count)]
        drafts = {name: Draft("x", [1] * 4) for name in names}
        chances = {name: [0.9, 0.8, 0.7, 0.6] for name in names}
        contexts = dict.fromkeys(names, 100)
        chosen = choose_lengths(drafts, contexts, decodes(count), times, Known(chances))
        rows.append(sum(chosen.values()) / count)
    assert rows[0] == 4 and rows == sorted(rows, reverse=True)


def test_acceptance_follows_what_is_seen():
    acceptance = Acceptance()
    sure = Draft("x", [1] * 9, 12)
    unsure = Draft("x", [1] * 9, 2)
    for _ in range(50):
        acceptance.observe("a", sure, 0, True)
        acceptance.observe("a", unsure, 0, False)
    assert acceptance.probability("a", sure, 0) > 0.9
    assert acceptance.probability("b", sure, 0) > 0.9  # others learn from it
    assert acceptance.probability("a", unsure, 0) < 0.1
    assert acceptance.expected("a", sure, 9) > 5 * acceptance.expected("a", unsure, 9)
    for _ in range(10):
        acceptance.observe("b", sure, 0, False)
    assert acceptance.probability("b", sure, 0) < 0.5 < acceptance.probability("c", sure, 0)


class Fixed:
    """Proposes the same draft for every request."""

    def __init__(self, token_ids, match=5):
        self.token_ids = token_ids
        self.match = match
        self.asked = 0

    def propose(self, request, limit):
        self.asked += 1
        return [Draft("fixed", self.token_ids[:limit], self.match)] if limit else []

    def forget(self, request):
        pass


def make_request(name="a", **options):
    return Request(
        name, [5] * 20, SamplingParams(max_tokens=99), 0.0, output_token_ids=[4], **options
    )


def step(speculator, requests, said):
    """A step in which every request says the same; returns the drafts."""
    drafts = speculator.draft(requests)
    shares = []
    for request in requests:
        token_ids = [4, *drafts.get(request.request_id, [])]
        known = request.num_tokens - 1
        args = [
            request.request_id,
            Phase.DECODE,
            token_ids,
            known,
            [0],
            True,
            request.sampling_params,
        ]
        shares.append(ScheduledRequest(*args, num_drafts=len(token_ids) - 1))
    speculator.observe(
        Batch(shares, []), StepOutput({request.request_id: list(said) for request in requests})
    )
    return drafts


def test_it_learns_from_drafts_that_were_not_verified():
    requests = [make_request(str(number)) for number in range(8)]
    speculator = Speculator([Fixed([7, 7, 7])], Times(1.0), most=3)
    for _ in range(40):
        assert step(speculator, requests, [9]) == {}  # too expensive, and wrong
    wrong = speculator.acceptance.probability("new", Draft("fixed", [7], 5), 0)
    for _ in range(400):
        drafts = step(speculator, requests, [7])
    assert speculator.acceptance.probability("new", Draft("fixed", [7], 5), 0) > 0.9 > 0.1 > wrong
    assert drafts == {}
    assert step(speculator, requests[:1], [7]) != {}  # with one request it pays


def test_who_is_asked_for_nothing_is_asked_less_often_until_a_draft_is_wanted():
    fixed = Fixed([7, 7, 7])
    requests = [make_request(str(number)) for number in range(2)]
    speculator = Speculator([fixed], Times(0.3), most=3, retry=4)

    def asked(steps, said):
        before = fixed.asked
        for _ in range(steps):
            step(speculator, requests, [said])
        return fixed.asked - before

    assert asked(BACKOFF_AFTER_MISSES, 9) == 2 * BACKOFF_AFTER_MISSES
    assert asked(4 * BACKOFF_AFTER_MISSES, 9) == 2 * BACKOFF_AFTER_MISSES
    assert asked(16 * 8, 9) <= 2 * (16 + 1)
    asked(300, 7)  # the guesses turn out right, so that they are drafted ...
    assert asked(40, 7) == 2 * 40  # ... and looked for in every step again
    speculator.forget(requests[0])
    assert not speculator.sources("0")


def test_where_nobody_wants_drafts_who_comes_is_asked_less_often_at_once():
    fixed = Fixed([7, 7, 7])
    speculator = Speculator([fixed], Times(0.3), most=3, retry=8)
    for number in range(2 * BACKOFF_NEW_REQUESTS_AFTER // BACKOFF_AFTER_MISSES):
        for _ in range(BACKOFF_AFTER_MISSES):
            step(speculator, [make_request(str(number))], [9])
    before = fixed.asked
    for _ in range(40):
        step(speculator, [make_request("new")], [9])
    assert fixed.asked - before <= 1 + 40 // 8


@pytest.mark.parametrize(("takes", "least", "most"), [(0.1, 200, 200), (3.0, 10, 60)])
def test_a_guess_that_takes_longer_than_it_saves_is_seldom_asked_for(
    monkeypatch, takes, least, most
):
    class Slow(Fixed):
        def propose(self, request, limit):
            now[0] += takes
            return super().propose(request, limit)

    now = [0.0]
    slow = Slow([7])
    monkeypatch.setattr(speculator.time, "perf_counter", lambda: now[0])
    drafter = Speculator([slow], Times(0.01), most=3)
    for _ in range(200):
        step(drafter, [make_request()], [7, 7])
    assert least <= slow.asked <= most


def test_the_slo_of_now_holds():
    slo = [0.5]
    speculator = Speculator([Fixed([7, 7, 7])], Times(0.0), most=3, slo_seconds=lambda: slo[0])
    assert step(speculator, [make_request()], [7, 7, 7, 7]) == {}
    slo[0] = 2.0
    assert step(speculator, [make_request()], [7, 7, 7, 7]) == {"a": [7, 7, 7]}


def test_a_proposer_that_fails_is_switched_off_for_the_request():
    class Broken:
        calls = 0

        def propose(self, request, limit):
            self.calls += 1
            raise RuntimeError("struck by the test")

        def forget(self, request):
            pass

    broken = Broken()
    fixed = Fixed([7, 7])
    speculator = Speculator([broken, fixed], Times(0.0), most=2)
    for _ in range(3):
        assert step(speculator, [make_request()], [7, 7, 7]) == {"a": [7, 7]}
    assert (broken.calls, fixed.asked, speculator.num_failures) == (1, 3, 1)
    step(speculator, [make_request("b")], [7])
    assert broken.calls == 2


def test_a_draft_ends_where_the_constraint_does():
    class Three:
        def admits(self, output_token_ids, draft):
            return min(3, len(draft))

        def forced(self, output_token_ids, limit):
            return []

    speculator = Speculator([Fixed([7, 7, 7, 7, 7])], Times(0.0), most=5)
    assert speculator.draft([make_request(constraint=Three())]) == {"a": [7, 7, 7]}


def test_sources_are_counted():
    speculator = Speculator([Fixed([7, 7])], Times(0.0), most=2)
    step(speculator, [make_request()], [7, 9])
    counts = speculator.sources("a")["fixed"]
    assert (counts.drafted, counts.accepted) == (2, 1)
    speculator.forget(make_request())
    assert speculator.sources("a") == {}
