"""Separates the reasoning in an answer from its content while the answer streams.

Models that think write their reasoning first, between two tags. `answers.py` labels tokens.
"""

from __future__ import annotations

from twinphase.tokenizer.detokenizer import overlap
from twinphase.tokenizer.think_tags import ThinkTags


class ReasoningSplitter:
    """Divides the text of one answer, as it comes, into reasoning and content.

    Tags and adjacent newlines belong to neither. The joined output does not depend on how the text
    is cut into pieces.
    """

    def __init__(self, tags: ThinkTags, opened: bool) -> None:
        """`opened`: whether the prompt ends inside the thinking part (see `opens_thinking`)."""
        self._tags = tags
        self._beginning = True  # Whether the answer may still begin with the start tag.
        self._thinking = opened
        self._beside_tag = opened  # Whether newlines are dropped.
        self._held = ""

    @property
    def reasoning(self) -> bool:
        """Whether the answer is now inside its thinking part, after a complete start tag."""
        return self._thinking

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece of text; return reasoning and content that are certain."""
        self._held += text
        if self._beginning and not self._begin():
            return "", ""
        reasoning = self._think() if self._thinking else ""
        if self._thinking:
            return reasoning, ""
        self._drop_newlines()
        content = self._held
        self._held = ""
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """End the answer; return the held text as reasoning and content."""
        self._drop_newlines()
        held = self._held
        self._held = ""
        return (held, "") if self._thinking else ("", held)

    def _begin(self) -> bool:
        """Remove a tag at the start of the answer; return False while that is uncertain."""
        text = self._held.lstrip()
        start = self._tags.start
        without = self._tags.without
        if text.startswith(start):
            self._held = text[len(start) :]
            self._thinking = self._beside_tag = True
        elif without and text.startswith(without):
            self._held = text[len(without) :]
        elif start.startswith(text) or without.startswith(text):
            return False
        self._beginning = False
        return True

    def _think(self) -> str:
        """Return reasoning up to the end tag, or up to text that may become an end tag."""
        self._drop_newlines()
        at = self._held.find(self._tags.end)
        self._thinking = at < 0
        if self._thinking:
            at = len(self._held) - overlap(self._held, self._tags.end)
        reasoning = self._held[:at].rstrip("\n")
        if self._thinking:
            self._held = self._held[len(reasoning) :]
        else:
            self._held = self._held[at + len(self._tags.end) :]
            self._beside_tag = True
        return reasoning

    def _drop_newlines(self) -> None:
        if self._beside_tag:
            self._held = self._held.lstrip("\n")
            self._beside_tag = not self._held
