"""The commands of a chat, on a model that is a script."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from twinphase.chat import chat as chat_module
from twinphase.chat.chat import Chat
from twinphase.chat.conversation import MAX_KEPT, Conversation, folder, save
from twinphase.chat.reader import Reader
from twinphase.config import EngineConfig
from twinphase.errors import InvalidRequestError
from twinphase.phases.report import PhaseReport, PhaseRow
from twinphase.request import SamplingParams
from twinphase.terminal import short_report

ROW = PhaseRow("prefill", 31, 0, 0.01, 0.5, 3100.0, "MFU", 0.6, None, 0, "compute")
REPORT = PhaseReport(1.0, (ROW, ROW), (), 0.012, 0.005)


@pytest.fixture
def talk(monkeypatch, cache) -> Iterator[Any]:
    """Types lines into a chat; `asked` has what reached the model."""
    asked: list[tuple[list[dict[str, str]], SamplingParams]] = []

    def answer(llm, messages, params, wrap):
        asked.append((list(messages), params))
        text = f"answer {len(asked)}"
        output = SimpleNamespace(outputs=[SimpleNamespace(text=text)])
        return SimpleNamespace(output=output, interrupted=False)

    monkeypatch.setattr(chat_module, "stream_answer", answer)
    monkeypatch.setattr(chat_module, "report_answer", lambda *_: (REPORT, None))

    def run(*lines: str | type[BaseException], conversation: Conversation | None = None) -> int:
        given = iter([*lines, EOFError])

        def read(_: Reader) -> str:
            line = next(given)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(Reader, "read", read)
        llm = SimpleNamespace(
            config=EngineConfig(backend="reference"), explain=lambda _: "the explanation"
        )
        talk.conversation = conversation or Conversation("tiny", SamplingParams())
        return Chat(llm, talk.conversation).run()  # type: ignore[arg-type]

    talk = SimpleNamespace(run=run, asked=asked)
    yield talk


def test_settings_take_effect_and_are_never_sent(talk, capsys):
    talk.run("/set temperature 0", "/set parameter top_k 5", "/set system Be brief.", "hi")
    ((messages, params),) = talk.asked
    assert (params.temperature, params.top_k) == (0, 5)
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    talk.run("/set temperature warm", "/set colour blue", "/set", "/set seed")
    errors = capsys.readouterr().err
    assert len(talk.asked) == 1
    assert errors.count("error:") == 4 and "no setting 'colour'" in errors


@pytest.mark.parametrize(
    ("value", "stop"), [("5", ["5"]), ("null", None), ("a b", ["a b"]), ('["a", "b"]', ["a", "b"])]
)
def test_a_stop_is_text_or_a_list_of_texts(talk, value, stop):
    assert talk.run(f"/set stop {value}", "hi") == 0
    ((_, params),) = talk.asked
    assert params.stop == stop


@pytest.mark.parametrize("damage", [{"began": "noon"}, {"settings": {"top_p": 7}}, {"messages": 1}])
def test_a_damaged_conversation_changes_nothing(damage):
    conversation = Conversation("tiny", SamplingParams(), "Be brief.")
    before = conversation.as_dict()
    other = Conversation("tiny", SamplingParams(temperature=0.5), "Rhyme.")
    with pytest.raises(InvalidRequestError):
        conversation.take(other.as_dict() | damage)
    assert conversation.as_dict() == before


def test_an_unknown_command_is_refused_with_what_is_near(talk, capsys):
    talk.run("/hepl", "/usr/bin/env is a path")
    errors = capsys.readouterr().err
    assert not talk.asked and "Did you mean /help" in errors and errors.count("error:") == 2


@pytest.mark.parametrize("word", ["/bye", "/exit", "/quit"])
def test_leaving(talk, word):
    assert talk.run(word, "never read") == 0
    assert not talk.asked


def test_ctrl_c_at_the_prompt_leaves_the_second_time(talk, capsys):
    assert talk.run(KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt) == 130
    assert len(talk.asked) == 1 and capsys.readouterr().err.count("again") == 2


def test_clear_forgets_and_an_empty_line_asks_nothing(talk):
    talk.run("one", "", "two", "/clear", "three")
    assert [len(messages) for messages, _ in talk.asked] == [1, 3, 1]


def test_save_load_and_continue(talk, capsys):
    talk.run("/set temperature 0.5", "one", "/save my-talk")
    talk.run("/load my-talk", "two", "/load other", "/save a/b")
    messages, params = talk.asked[-1]
    assert [one["content"] for one in messages] == ["one", "answer 1", "two"]
    assert params.temperature == 0.5
    errors = capsys.readouterr().err
    assert "no conversation 'other'" in errors and "Saved: my-talk." in errors
    assert "cannot be called 'a/b'" in errors
    assert oct((folder() / "my-talk.json").stat().st_mode)[-3:] == "600"


def test_the_last_few_conversations_are_kept(cache):
    for number in range(MAX_KEPT + 3):
        save(Conversation("tiny", SamplingParams(), began=float(number)))
    assert len(list(folder().glob("*.json"))) == MAX_KEPT


def test_without_history_nothing_is_written(talk):
    talk.run("/set nohistory", "one")
    assert not list(folder().glob("*.json"))


def test_statistics(talk, capsys):
    talk.run("one")
    assert "TTFT 12 ms" in capsys.readouterr().err
    talk.run("/set quiet", "one")
    assert "tok/s" not in capsys.readouterr().err
    talk.run("/set verbose", "one", "/explain", "/show")
    shown = capsys.readouterr().err
    assert "wall" in shown and "the explanation" in shown and "Model: tiny" in shown
    talk.run("/stats", "/explain")
    assert capsys.readouterr().err.count("There is no answer yet") == 2


@pytest.mark.parametrize(
    ("columns", "parts"),
    [(20, 0), (65, 0), (80, 1), (120, 2)],
    ids=["narrow", "half", "usual", "wide"],
)
def test_the_short_line_fits(columns, parts):
    line = short_report(REPORT, columns)
    assert len(line) <= columns
    assert ("TTFT" in line) + ("compute-bound" in line) == parts
