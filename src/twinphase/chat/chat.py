"""The loop of a chat: reads a message, streams the answer, and runs /commands."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from twinphase import terminal
from twinphase.answer import INTERRUPTED, Answer, report_answer, stream_answer
from twinphase.chat.conversation import SETTINGS, Conversation, folder, load, save
from twinphase.chat.reader import Reader, hidden_keys
from twinphase.errors import InvalidRequestError, TwinphaseError

if TYPE_CHECKING:
    from twinphase.engine.frontends.llm import LLM
    from twinphase.phases.report import PhaseReport

WELCOME = "Ask away. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."
HELP = f"""\
/help, /?              this list
/bye, /exit, /quit     leave; so does Ctrl-D
/clear                 forget the conversation
/set NAME VALUE        change how answers are sampled: {", ".join(SETTINGS[:4])}, ...
/set system TEXT       change the system message
/set verbose | quiet   all lines of statistics after each answer, or none; /set brief for one
/set nowordwrap        let the terminal break lines; /set wordwrap
/set nohistory         keep neither lines nor conversations; /set history
/show                  the settings, and the size of the conversation
/save NAME, /load NAME keep the conversation under a name, and return to it
/stats                 all lines of statistics of the last answer
/explain               where the last answer's time went, and what to change
\"\"\"                    begins and ends a message of several lines; Alt-Enter begins a line"""
LEAVE = ("/bye", "/exit", "/quit")
# The attribute, and its value, for each /set WORD.
SWITCHES: dict[str, tuple[str, str | bool]] = {
    "verbose": ("statistics", "verbose"),
    "brief": ("statistics", "brief"),
    "quiet": ("statistics", "quiet"),
    "wordwrap": ("wraps", True),
    "nowordwrap": ("wraps", False),
    "history": ("keeps_history", True),
    "nohistory": ("keeps_history", False),
}


class Chat:
    """A chat with a loaded model on this terminal.

    Attributes:
        statistics: amount of statistics after an answer: "brief", "verbose" or "quiet".
        wraps: whether lines are broken between words.
        keeps_history: whether lines and conversations are written to files.
    """

    def __init__(
        self, llm: LLM, conversation: Conversation, *, verbose: bool = False, history: bool = True
    ) -> None:
        self.llm = llm
        self.conversation = conversation
        self.statistics = "verbose" if verbose else "brief"
        self.wraps = True
        self.keeps_history = history
        self._last: tuple[Answer, PhaseReport] | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: terminal.note(HELP),
            "/?": lambda _: terminal.note(HELP),
            "/clear": self._clear,
            "/set": self._set,
            "/show": self._show,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/explain": self._explain,
        }

    def run(self) -> int:
        """Chat until the user leaves; returns the exit code."""
        from twinphase.engine.loading.ceilings import IdleMeasurement

        reader = Reader(
            [*self._commands, *LEAVE],
            folder() / "history" if self.keeps_history else None,
            lambda: self.keeps_history,
        )
        idle = IdleMeasurement(self.llm.config)
        terminal.note(WELCOME)
        leaving = False
        while True:
            try:
                with idle:
                    text = reader.read()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if leaving:
                    return INTERRUPTED
                terminal.note("Press Ctrl-C again, or Ctrl-D, to leave.")
                leaving = True
                continue
            leaving = False
            if text in LEAVE:
                return 0
            try:
                with hidden_keys():
                    self._take(text)
            except TwinphaseError as error:
                terminal.error_line(error)
            # This happens before the first step, or during another computation.
            except KeyboardInterrupt:
                print(file=sys.stderr)

    def _take(self, text: str) -> None:
        if not text.startswith("/"):
            if text:
                self._answer(text)
            return
        word, _, rest = text.partition(" ")
        command = self._commands.get(word)
        if command is None:
            near = difflib.get_close_matches(word, [*self._commands, *LEAVE], 3, 0.5)
            hint = f"Did you mean {' or '.join(near)}? " if near else ""
            raise InvalidRequestError(f"There is no command {word[:80]}.", f"{hint}See /help.")
        command(rest.strip())

    def _answer(self, text: str) -> None:
        question = {"role": "user", "content": text}
        began = time.perf_counter()
        answer = stream_answer(
            self.llm,
            [*self.conversation.messages, question],
            self.conversation.params,
            wrap=self.wraps,
        )
        report, _ = report_answer(self.llm, answer, time.perf_counter() - began)
        self._last = answer, report
        said = {"role": "assistant", "content": answer.output.outputs[0].text}
        self.conversation.turns += [question, said]
        if self.statistics == "verbose":
            terminal.show_report(report)
        elif self.statistics == "brief":
            terminal.show_short_report(report)
        if self.keeps_history:
            save(self.conversation)

    def _clear(self, _: str) -> None:
        self.conversation.turns = []
        self.conversation.began = time.time()
        terminal.note("Conversation cleared.")

    def _set(self, rest: str) -> None:
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        if name in SWITCHES and not value:
            attribute, new = SWITCHES[name]
            setattr(self, attribute, new)
            terminal.note(f"Set {name}.")
            return
        if name == "system":
            self.conversation.system = value.strip().strip('"') or None
        elif not value:
            raise InvalidRequestError(
                "/set needs a name and a value." if not name else f"/set {name} needs a value.",
                f"Names: system, {', '.join(SETTINGS)}; or one of {', '.join(SWITCHES)}.",
            )
        else:
            self.conversation.set(name, value.strip())
        terminal.note(f"Set {name}.")

    def _show(self, _: str) -> None:
        found = self.conversation.as_dict()
        settings = ", ".join(
            f"{name} {value}" for name, value in found["settings"].items() if value is not None
        )
        terminal.note(f"Model: {self.conversation.model}")
        terminal.note("System: " + (self.conversation.system or "the model's own"))
        terminal.note(f"Sampling: {settings}")
        terminal.note(f"Messages: {len(self.conversation.turns)}")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidRequestError("/save needs a name.", "Write /save NAME.")
        terminal.note(f"Saved as {save(self.conversation, name)}.")

    def _load(self, name: str) -> None:
        if not name:
            raise InvalidRequestError("/load needs a name.", "Write /load NAME.")
        self.conversation.take(load(name))
        terminal.note(f"Loaded {name}: {len(self.conversation.turns)} messages.")

    def _last_answer(self) -> tuple[Answer, PhaseReport]:
        if self._last is None:
            raise InvalidRequestError("There is no answer yet.", "Ask something first.")
        return self._last

    def _stats(self, _: str) -> None:
        terminal.show_report(self._last_answer()[1])

    def _explain(self, _: str) -> None:
        terminal.note(str(self.llm.explain(self._last_answer()[0].output)))
