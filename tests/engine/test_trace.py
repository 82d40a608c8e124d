"""A replayed step log yields the same decisions byte for byte, or reports the first difference."""

import io
import json
import random

import pytest

from schedules import Machine, engine_request, machine_engine
from twinphase.engine.trace import TraceWriter, replay, trace_header
from twinphase.errors import InvalidRequestError
from twinphase.outcome import FinishReason
from twinphase.phases.cost import starting_prices
from twinphase.phases.work import ModelShape
from twinphase.scheduler.pace import Pace

GUESS = starting_prices(ModelShape(10**8, 3 * 10**7, 6 * 10**7, 3 * 10**7, 30, 9, 3, 64), None)


class Guesser:
    """Drafts of any length, each token of which is right more often than not."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def draft(self, requests):
        choose = self.random
        return {
            r.request_id: choose.choices([7, 8], [3, 1], k=choose.randint(0, 9)) for r in requests
        }

    def observe(self, batch, output):
        pass

    def forget(self, request):
        pass


def random_run(seed, policy="priority", slo=0.012, window=None, tenants=("",), drafter=None):
    """An overloaded engine with aborts, failures and noise, and its step log."""
    choose = random.Random(seed)
    machine = Machine(
        lambda work: (2e-3 + 3e-4 * work.rows + 1e-6 * sum(work)) * choose.uniform(0.8, 1.3)
    )
    settings = {"num_blocks": 24, "max_num_seqs": 6, "max_num_batched_tokens": 48, "policy": policy}
    engine = machine_engine(machine, GUESS, pace=Pace(slo), **settings)
    engine.cost_model.window = window
    engine.cost_model.windowed_share = 0.0 if window is None else 5 / 6
    engine.drafter = drafter
    file = io.StringIO()
    engine.recorder.trace = TraceWriter(file, trace_header(engine.scheduler, engine.cost_model))
    unfinished = []
    for number in range(80):
        for _ in range(choose.choice([0, 0, 1, 3])):
            name = f"{number}-{len(unfinished)}"
            prompt = [choose.choice([20, 30])] * choose.randint(1, 30) + [choose.randrange(90)]
            request = engine_request(
                name,
                prompt,
                priority=choose.randint(-2, 2) if policy == "priority" else 0,
                max_tokens=choose.choice([1, 9, 30]),
                temperature=choose.choice([0.0, 0.8]),
                stop_token_ids=choose.choice([None, [7]]) if choose.random() < 0.3 else None,
                logit_bias=choose.choice([None, {5: 1.5}]),
            )
            request.cache_salt = choose.choice([None, "mine \u00e9"])
            if len(tenants) > 1:
                request.tenant = choose.choice(tenants)
                request.weight = choose.choice([0.5, 1.0, 3.0])
            request.fresh = number % 9 == 5
            engine.add_request(request)
            unfinished.append(request)
        unfinished = [request for request in unfinished if request.finish_reason is None]
        if unfinished and choose.random() < 0.1:
            engine.finish(
                choose.choice(unfinished).request_id,
                choose.choice([FinishReason.ABORT, FinishReason.STOP]),
            )
        machine.struck = (
            {choose.choice(unfinished).request_id}
            if unfinished and choose.random() < 0.05
            else set()
        )
        if choose.random() < 0.05:
            engine.keep_pace(
                Pace(choose.choice([None, 0.009, 0.0121]), choose.choice([0.0, 0.004]), True)
            )
        if choose.random() < 0.05:
            engine.limit_prefill(choose.choice([None, 4]))
        machine.now += choose.choice([0.0, 1e-4])  # what the front end takes
        if (
            number % 7 == 3
        ):  # as if another engine had computed the beginning of a prompt that may come
            other = engine_request("other", [20 + number % 2 * 10] * 4 * (1 + number % 5))
            prefix_cache = engine.scheduler.kv_cache.prefix_cache
            blocks = [prefix_cache.block(other, index) for index in range(other.num_tokens // 4)]
            engine.accept(blocks, lambda block_ids, which: None)
        if engine.has_work:
            engine.step()
    machine.struck = set()
    while engine.has_work:
        engine.step()
    return file.getvalue(), engine


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "steps.jsonl"

    def write(text):
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("tenants", [("",), ("", "a", "b")])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("policy", "slo"), [("priority", 0.012), ("fcfs", None)])
def test_a_replay_decides_the_same(log, seed, policy, slo, tenants):
    text, engine = random_run(seed, policy, slo, tenants=tenants)
    result = replay(log(text))
    assert result.difference is None
    assert result.num_steps == engine.ledger.num_steps
    assert engine.scheduler.num_preemptions > 0
    events = [json.loads(line) for line in text.splitlines()]
    bound = None
    for event in events:
        bound = event["num_tokens"] if event["event"] == "bound" else bound
        assert bound is None or sum(share[2] for share in event.get("prefills", ())) <= bound
    assert {event["event"] for event in events} == {
        "header",
        "add",
        "finish",
        "step",
        "observe",
        "pace",
        "accept",
        "bound",
    }


def test_a_step_log_tells_how_long_a_step_had_no_processor():
    machine = Machine()
    engine = machine_engine(machine)
    waited = iter([1.0, 1.25, 2.0, 2.0])
    engine.recorder.cpu_wait = lambda: next(waited)
    file = io.StringIO()
    engine.recorder.trace = TraceWriter(file, trace_header(engine.scheduler, engine.cost_model))
    engine.add_request(engine_request("a", 4, max_tokens=2))
    while engine.has_work:
        engine.step()
    events = map(json.loads, file.getvalue().splitlines())
    assert [event["cpu_wait"] for event in events if event["event"] == "observe"] == [0.25, 0.0]


@pytest.mark.parametrize("seed", range(2))
def test_a_replay_decides_the_same_with_drafts(log, seed):
    text, engine = random_run(seed, drafter=Guesser(seed))
    assert replay(log(text)).difference is None
    steps = [event for event in map(json.loads, text.splitlines()) if event["event"] == "step"]
    taken = [(step, share[0], share[2]) for step in steps for share in step["decodes"]]
    assert any(
        0 < count < len(step["drafts"][name])
        for step, name, count in taken
        if name in step["drafts"]
    )
    assert any(len(tokens) > 1 for step in steps for tokens in step["token_ids"].values())
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("policy", "slo"), [("priority", 0.012), ("fcfs", None)])
def test_a_lone_tenant_is_scheduled_as_if_there_were_none(policy, slo):
    def steps(tenant):
        text, _ = random_run(3, policy, slo, tenants=(tenant, tenant))
        return [line for line in text.splitlines() if '"event":"add"' not in line]

    assert len(steps("a")) > 80
    assert steps("a") == steps("")


def test_a_windowed_models_log_carries_its_window(log):
    text, engine = random_run(1, window=8)
    header = json.loads(text.splitlines()[0])
    assert (header["window"], header["windowed_share"]) == (8, 5 / 6)
    assert replay(log(text)).difference is None
    assert any(record.decode.attention_flops for record in engine.ledger.records)


def steps_of(text):
    lines = text.splitlines(keepends=True)
    return lines, [number for number, line in enumerate(lines) if '"event":"step"' in line]


@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("step", lambda step: step["prefills"][0].__setitem__(2, 999)),
        ("step", lambda step: step["prefills"][0][3].append(23)),
        ("step", lambda step: step.update(held_back="seats")),
        ("step", lambda step: step.update(preempted=["0"])),
        ("add", lambda add: add["prompt_token_ids"].append(3)),
    ],
)
def test_a_log_that_was_changed_is_found_out_at_its_line(log, event, change):
    text, _ = random_run(0)
    lines, steps = steps_of(text)
    changed = next(n for n in steps if json.loads(lines[n])["prefills"])
    at = (
        changed
        if event == "step"
        else next(n for n, line in enumerate(lines) if '"event":"add"' in line)
    )
    values = json.loads(lines[at])
    change(values)
    lines[at] = json.dumps(values, separators=(",", ":")) + "\n"
    result = replay(log("".join(lines)))
    number, logged, new = result.difference
    assert number == changed + 1
    assert logged == lines[changed].rstrip("\n") != new
    assert json.loads(new)["event"] == "step"
    assert result.num_steps == steps.index(changed)


def test_other_times_lead_to_other_chunks(log):
    text, _ = random_run(0)
    lines = text.splitlines(keepends=True)
    slow = [
        json.dumps({**json.loads(line), "seconds": 1.0}, separators=(",", ":")) + "\n"
        if '"observe"' in line
        else line
        for line in lines
    ]
    assert replay(log("".join(slow))).difference is not None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is empty"),
        (
            '{"event":"header","version":99}\n',
            "Line 1 of .* not the header of a step log of version 7",
        ),
        ('{"event":"header","version":7}\n', "Line 1 of .* KeyError: 'prices'"),
        ('{"a":1}\n', "Line 1 of .* not the header"),
        ("hello\n", "Line 1 of .* is not a JSON object"),
        ("[1]\n", "Line 1 of .* is not a JSON object"),
        ('LOG{"event":"wish"}', "Line {} of .*The event 'wish' is not known"),
        ('LOG{"cut', "Line {} of .*not a JSON object"),
        ('LOG{"event":"step"}', "Line {} of .*KeyError: 'drafts'"),
        (
            'LOG{"event":"add","sampling_params":{"temperature":-1}}',
            "Line {} of .*temperature is -1",
        ),
        ('LOG{"event":"add","sampling_params":{"heat":1}}', "Line {} of .*TypeError: .*heat"),
        (
            'LOG{"event":"finish","request_id":"0","reason":"boredom"}',
            "Line {} of .*ValueError: .*boredom",
        ),
        ('LOG{"event":"observe","seconds":"long","gap":0}', "Line {} of "),
    ],
)
def test_what_is_no_log_or_does_not_belong_into_one(log, text, match):
    """LOG stands for a log up to its first observation, {} for the number of the next line."""
    lines = random_run(0)[0].splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if '"event":"observe"' in line) + 1
    with pytest.raises(InvalidRequestError, match=match.format(first + 1)):
        replay(log(text.replace("LOG", "".join(lines[:first]))))


def test_what_is_no_file_or_no_text(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidRequestError, match="Cannot read"):
            replay(path)
    (tmp_path / "bytes").write_bytes(b"\xff\x00\xfe")
    with pytest.raises(InvalidRequestError, match="Line 1 of .* is not a JSON object"):
        replay(tmp_path / "bytes")


def test_every_step_is_on_disk_when_it_is_done(make_llm, tmp_path):
    path = tmp_path / "trace.jsonl"
    llm = make_llm(trace_file=str(path), num_kv_blocks=8)
    outputs = llm.generate([[40 + n] * 30 for n in range(5)])
    assert all(output.finished for output in outputs)
    result = replay(path)
    assert (result.difference, result.num_steps) == (None, llm.engine.ledger.num_steps)


def test_a_full_disk_ends_the_log_and_nothing_else(caplog):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(28, "No space left on device")

    machine = Machine()
    engine = machine_engine(machine)
    engine.recorder.trace = TraceWriter(Full(), trace_header(engine.scheduler, engine.cost_model))
    request = engine_request("a", 5, max_tokens=3)
    engine.add_request(request)
    while engine.has_work:
        engine.step()
    assert request.output_token_ids == [7] * 3
    assert "No space left" in str(engine.recorder.trace.error)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
