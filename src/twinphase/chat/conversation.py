"""A conversation: its messages and settings, and the files that store it."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from twinphase.errors import InvalidRequestError, StorageError
from twinphase.request import SamplingParams
from twinphase.weights.storage import cache_root, storage_error, write_atomically

MAX_KEPT = 5
RECENT = "recent-"
NAME = re.compile(r"[\w][\w.-]{0,99}")
# Settings that /set can change; other fields of SamplingParams make no sense between turns.
SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
Message = dict[str, str]


@dataclass
class Conversation:
    """The messages so far, and the sampling settings for the next answer.

    Attributes:
        model: name that the user gave.
        turns: messages of the user and the model.
        system: system message; None uses the model's default.
        began: start of the conversation, in seconds since 1970.
    """

    model: str
    params: SamplingParams
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    @property
    def messages(self) -> list[Message]:
        """All messages, in the form for a chat template."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.turns

    def set(self, name: str, text: str) -> None:
        """Change a sampling setting.

        Raises:
            InvalidRequestError: there is no such setting, or the value is not allowed.
        """
        if name not in SETTINGS:
            raise InvalidRequestError(
                f"There is no setting {name!r}.", f"Settings: {', '.join(SETTINGS)}."
            )
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        kinds = {one.name: str(one.type) for one in fields(SamplingParams)}[name]
        if name == "stop":
            value = value if value is None or isinstance(value, list) else [text]
        elif isinstance(value, str) or (isinstance(value, bool) and "bool" not in kinds):
            raise InvalidRequestError(f"{name} cannot be {text!r}.", "Give a number.")
        self.params = replace(self.params, **{name: value})

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        settings = {name: value for name, value in asdict(self.params).items() if name in SETTINGS}
        return {
            "model": self.model,
            "system": self.system,
            "began": self.began,
            "settings": settings,
            "messages": self.turns,
        }

    def take(self, saved: dict[str, Any]) -> None:
        """Continue a conversation that `as_dict` returned.

        Raises:
            InvalidRequestError: `saved` is not a conversation.
        """
        try:
            turns = [
                {"role": str(one["role"]), "content": str(one["content"])}
                for one in saved["messages"]
            ]
            params = replace(self.params, **saved["settings"])
            system = saved["system"] if saved["system"] is None else str(saved["system"])
            began = float(saved["began"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"The saved conversation is damaged ({error!r}).", "Load another one."
            ) from None
        self.turns = turns
        self.params = params
        self.system = system
        self.began = began


def folder() -> Path:
    return cache_root() / "chats"


def save(conversation: Conversation, name: str | None = None) -> Path:
    """Save a conversation under a name, or among the last few.

    Raises:
        InvalidRequestError: a file cannot have this name.
        StorageError: the file cannot be written.
    """
    path = _path(name or f"{RECENT}{conversation.began:.0f}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = json.dumps(conversation.as_dict(), ensure_ascii=False, indent=1)
        write_atomically(path, content.encode())  # Only the owner can read a new file.
        os.chmod(path, 0o600)
        for old in _recent()[MAX_KEPT:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, path) from error
    return path


def load(name: str | None = None) -> dict[str, Any]:
    """Load the conversation with that name, or the last one.

    Raises:
        InvalidRequestError: there is no such conversation, or it is damaged.
        StorageError: the file cannot be read.
    """
    path = _path(name) if name else next(iter(_recent()), None)
    if path is None or not path.is_file():
        names = sorted(one.stem for one in folder().glob("*.json") if not _is_recent(one))
        known = f"Saved: {', '.join(names)}." if names else "None is saved yet; /save NAME does it."
        what = f"There is no conversation {name!r}." if name else "There is no last conversation."
        raise InvalidRequestError(what, known)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.", "Load another.") from error
    except ValueError:
        saved = None
    if not isinstance(saved, dict):
        raise InvalidRequestError(f"{path} is damaged.", "Load another conversation.")
    return saved


def _path(name: str) -> Path:
    if not NAME.fullmatch(name):
        raise InvalidRequestError(
            f"A conversation cannot be called {name!r}.", "Use letters, digits, '.', '-' and '_'."
        )
    return folder() / f"{name}.json"


def _is_recent(path: Path) -> bool:
    return path.name.startswith(RECENT)


def _recent() -> list[Path]:
    """Files of conversations that were saved without a name, the newest first."""
    files = [path for path in folder().glob(f"{RECENT}*.json") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
