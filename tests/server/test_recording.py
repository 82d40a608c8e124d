"""Recordings: the stream of a real server read back, and files that are refused in one sentence."""

import gzip
import json

import pytest

from feed_reader import reading
from twinphase.cli import run_app
from twinphase.server.live import recording as module
from twinphase.server.live.recording import RecordingError, read_recording


def written(path, events):
    path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in events))
    return path


@pytest.fixture(scope="module")
def recorded(server):
    """The events of a request, and its answer."""
    with reading(server) as reader:
        reader.until("hello")
        body = {"prompt": "to be recorded", "max_tokens": 5, "ignore_eos": True}
        answer = server.post("/v1/completions", body)[1]
        reader.until_ended()
        reader.until("totals")
    events = [{k: v for k, v in one.items() if k != "event_id"} for one in reader.events]
    return events, answer


def test_a_saved_stream_is_a_recording_that_explain_reads(recorded, tmp_path, capsys):
    events, answer = recorded
    path = written(tmp_path / "saved.jsonl", events)
    found = read_recording(path)
    lane = list(found.lanes.values())[-1]
    assert lane["id"] == answer["id"] and lane["timings"] == answer["timings"]
    assert found.num_steps >= 5
    packed = tmp_path / "saved.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_recording(packed) == found
    assert run_app(["explain", str(packed), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["id"] == answer["id"]
    total = explained["waterfall"]["wall_seconds"]
    assert total == pytest.approx(answer["timings"]["e2e_ms"] / 1e3, abs=1e-3)


HELLO = {
    "event": "hello",
    "t": 0,
    "format": "twinphase-recording",
    "version": 1,
    "boot": "0",
    "workers": [{"id": "engine"}],
    "lanes": [],
}
LANE = {"event": "lane", "t": 1, "lane": 1, "prompt": 3}
COLUMNS = dict.fromkeys(["start", "duration_ms", "predicted_ms", "decode_ms"], [1])
STEPS = {"event": "steps", "t": 2, "worker": 0, "first": 0, **COLUMNS, "pre": [[[1, 3, 1]]]}
STEPS["dec"] = [[]]


@pytest.mark.parametrize(
    "events, what",
    [
        ([], "is empty"),
        ([LANE], "Line 1"),
        ([HELLO | {"version": 2}], "version 1"),
        ([HELLO, []], "not an event"),
        ([HELLO, {"event": "lane", "lane": 1, "prompt": 1}], "`t` is not a number"),
        ([HELLO, LANE | {"t": -1}], "below 0"),
        ([HELLO, LANE | {"at": float("nan")}], "Line 2"),
        ([HELLO, STEPS], "lane 1 was not introduced"),
        ([HELLO, LANE, STEPS | {"start": [1, 2]}], "different lengths"),
        ([HELLO, LANE, STEPS | {"worker": 1}], "worker 1 does not exist"),
        ([HELLO, LANE, STEPS | {"dec": [[[[], 1]]]}], "Line 3"),
        ([HELLO, {"event": "lane", "t": 1, "lane": "x", "prompt": 1}], "not a number"),
        ([HELLO, {"event": "blocks", "t": 1, "worker": 0, "lanes": 7}], "Line 2"),
    ],
)
def test_what_is_not_a_recording_is_refused(tmp_path, events, what):
    with pytest.raises(RecordingError, match=what) as error:
        read_recording(written(tmp_path / "bad.jsonl", events))
    assert str(error.value).count("\n") == 0


def test_unknown_events_and_fields_are_skipped(tmp_path):
    news = {"event": "weather", "t": 3, "sky": {"blue": True}}
    found = read_recording(written(tmp_path / "new.jsonl", [HELLO, LANE, news, STEPS | {"x": 1}]))
    assert found.num_steps == 1 and list(found.lanes) == [("0", 1)]


def test_files_that_are_too_large_or_cut_off_are_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "large.gz"
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    path.write_bytes(gzip.compress(b"{}\n" * (1 << 19)))  # small when packed
    with pytest.raises(RecordingError, match="larger than 1 MiB"):
        read_recording(path)
    path.write_bytes(gzip.compress(json.dumps(HELLO).encode())[:-9])
    assert run_app(["explain", str(path)]) == 2
    assert "cut off" in capsys.readouterr().err
    path.write_bytes(b"\x1f\x8b" + b"no gzip at all")
    with pytest.raises(RecordingError, match="damaged"):
        read_recording(path)
    deep = json.dumps(HELLO).encode() + b"\n" + b"[" * 100_000
    (tmp_path / "deep.jsonl").write_bytes(deep)
    with pytest.raises(RecordingError, match="Line 2"):
        read_recording(tmp_path / "deep.jsonl")
