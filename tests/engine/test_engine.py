import pytest

from schedules import Machine, engine_request, machine_engine
from twinphase.errors import ContextLengthError, InvalidRequestError, RequestNotFoundError
from twinphase.outcome import FinishReason, RequestStatus
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.pace import Pace


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def engine(machine):
    return machine_engine(
        machine, num_blocks=16, max_model_len=50, max_num_batched_tokens=8, max_num_seqs=8
    )


def make_request(request_id="a", prompt=(1, 2, 3), **options):
    return engine_request(request_id, prompt, **options)


def run(engine):
    results = []
    while engine.has_work:
        results.append(engine.step())
        engine.scheduler.check_integrity()
    assert not engine.timelines
    return results


def test_a_request_lives(engine):
    request = make_request(prompt=range(10), max_tokens=3)
    engine.add_request(request)
    results = run(engine)
    assert request.output_token_ids == [7, 7, 7]
    assert [(r.record.prefill_tokens, r.record.decode_tokens) for r in results] == [
        (8, 0),
        (2, 0),
        (0, 1),
        (0, 1),
    ]
    assert [result.finished for result in results] == [[], [], [], [request]]
    assert [result.output.token_ids for result in results] == [
        {},
        {"a": [7]},
        {"a": [7]},
        {"a": [7]},
    ]
    error = engine.cost_model.error()
    assert error.steps == 4 and error.p95 < 1e-6, "it learns from every step"


class Sevens:
    """Drafts three tokens that are right for each request."""

    def draft(self, requests):
        return {request.request_id: [7] * 3 for request in requests}

    def observe(self, batch, output):
        pass

    def forget(self, request):
        pass


@pytest.mark.parametrize(
    ("pace", "pauses"), [(Pace(2.0), True), (Pace(), False)], ids=["paced", "off"]
)
def test_a_drafter_rests_while_a_prompt_is_prefilled_at_a_pace(engine, pace, pauses):
    engine.keep_pace(pace)
    engine.drafter = Sevens()
    engine.add_request(make_request("stream", prompt=(1, 2), max_tokens=40))
    engine.step()
    assert engine.step().batch.decodes[0].num_drafts == 3
    engine.add_request(make_request("prompt", prompt=range(20), max_tokens=20))
    while (batch := engine.step().batch).prefills:
        assert (batch.decodes[0].num_drafts == 0) == pauses
    assert [share.num_drafts for share in batch.decodes] == [3, 0]
    run(engine)


class TestFailures:
    """A request that makes the executor raise, alone or with others."""

    def test_nothing_is_learned_from_it_and_its_time_adds_up(self, engine, machine):
        prices = engine.cost_model.prices
        machine.struck = {"bad"}
        request = make_request("bad", 3)
        other = make_request("other", 3, max_tokens=1)
        bad = engine.add_request(request)
        good = engine.add_request(other)
        record = engine.step().record
        assert engine.cost_model.prices == prices and engine.cost_model.error().steps == 0
        assert bad.end == good.end == record.end
        assert sum(bad.totals().values()) == pytest.approx(bad.end - bad.arrival)

    def test_nothing_of_it_is_findable(self, engine, machine):
        machine.struck = {"bad"}
        bad = make_request("bad", 8)
        engine.add_request(bad)
        engine.step()
        good = make_request("good", [*bad.prompt_token_ids, 1], max_tokens=1)
        engine.add_request(good)
        run(engine)
        assert (good.counts.num_cached_tokens, good.finish_reason) == (0, FinishReason.LENGTH)


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "error", "match"),
        [
            (make_request(prompt=[]), InvalidRequestError, "empty"),
            (
                make_request(prompt=[1, 100]),
                InvalidRequestError,
                "Token id 100 in prompt .* integers from 0 to 99",
            ),
            (make_request(prompt=[-1]), InvalidRequestError, "Token id -1"),
            (make_request(prompt=["a"]), InvalidRequestError, "Token id 'a'"),
            (make_request(prompt=[True]), InvalidRequestError, "Token id True"),
            (make_request(stop_token_ids=[100]), InvalidRequestError, "stop_token_ids"),
            (make_request(logit_bias={200: 1.0}), InvalidRequestError, "logit_bias"),
            (make_request(n=2), InvalidRequestError, "n is 2"),
            (
                make_request(prompt=[1] * 50),
                ContextLengthError,
                "has 50 tokens; the context holds 50.* by 1 tokens",
            ),
            (
                make_request(prompt=[1] * 40, max_tokens=11),
                ContextLengthError,
                "together 51.* Lower max_tokens to 10",
            ),
            (
                make_request(priority=1),
                InvalidRequestError,
                "priority 1, but scheduling_policy is 'fcfs'",
            ),
            (make_request("running"), InvalidRequestError, "'running' is in use"),
            (make_request("waiting"), InvalidRequestError, "'waiting' is in use"),
        ],
    )
    def test_nothing_else_is_disturbed(self, engine, request_, error, match):
        others = {name: make_request(name, 8, max_tokens=3) for name in ("running", "waiting")}
        for request in others.values():
            engine.add_request(request)
        engine.step()
        assert [request.status for request in others.values()] == [
            RequestStatus.RUNNING,
            RequestStatus.WAITING,
        ]
        with pytest.raises(error, match=match):
            engine.add_request(request_)
        assert set(engine.timelines) == set(others)
        run(engine)
        assert [request.output_token_ids for request in others.values()] == [[7] * 3] * 2

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("priority", [2**31, -(2**31) - 1, 0.5, True, float("nan"), "high"]),
            ("cache_salt", ["", "x" * 1025, 5, b"bytes"]),
        ],
    )
    def test_values_out_of_range(self, name, values):
        for value in values:
            with pytest.raises(InvalidRequestError, match=f"{name} is"):
                Request("a", [1], SamplingParams(), **{name: value})

    def test_the_largest_priorities_are_fine(self, machine):
        engine = machine_engine(machine, policy="priority", max_num_seqs=1)
        for name, priority in (("last", 2**31 - 1), ("first", -(2**31))):
            engine.add_request(make_request(name, priority=priority, max_tokens=1))
        assert [result.finished[0].request_id for result in run(engine)] == ["first", "last"]


class TestAbort:
    def test_unknown_and_finished_requests_are_not_found(self, engine):
        engine.add_request(make_request("a", max_tokens=1))
        engine.add_request(make_request("b", max_tokens=5))
        engine.step()
        for name in ("a", "never there"):
            with pytest.raises(
                RequestNotFoundError, match=f"No unfinished request has the id '{name}'"
            ) as caught:
                engine.abort(name)
            assert caught.value.http_status == 404
        assert set(engine.timelines) == {"b"}
        engine.finish("a", FinishReason.STOP)  # a front end may be late
        run(engine)
