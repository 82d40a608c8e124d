"""The thinking part of an answer, kept apart from the answer itself while both stream.

Models that think write it first, between two tags. Tokens are labelled in `answers.py`.
"""

from __future__ import annotations

from twinphase.tokenizer.detokenizer import overlap
from twinphase.tokenizer.think_tags import ThinkTags


class ReasoningSplitter:
    """Divides the text of one answer, as it comes, into reasoning and content.

    Tags and the newlines beside them belong to neither. The joined output does not depend on the
    cuts between pieces of text.
    """

    def __init__(self, tags: ThinkTags, opened: bool) -> None:
        """`opened`: the prompt ends inside the thinking part (see `opens_thinking`)."""
        self._tags = tags
        self._beginning = True  # the answer may still turn out to begin with the start tag
        self._thinking = opened
        self._beside_tag = opened  # newlines are dropped
        self._held = ""

    @property
    def reasoning(self) -> bool:
        """Whether the answer is now inside its thinking part, after a complete start tag."""
        return self._thinking

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece of the answer; return certain reasoning and content."""
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
        """Ends the answer and returns what was held back, as reasoning and content."""
        self._drop_newlines()
        held = self._held
        self._held = ""
        return (held, "") if self._thinking else ("", held)

    def _begin(self) -> bool:
        """Remove the tag that the answer begins with, if any; False while that is uncertain."""
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
        """Returns reasoning up to the end tag, or to what may become newlines and an end tag."""
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
