"""The tags between which a model thinks before it answers, as its chat template shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkTags:
    """The texts around a model's thinking.

    Attributes:
        start, end: texts before and after it.
        without: the beginning of an answer without thinking; empty for most models.
    """

    start: str
    end: str
    without: str = ""


_KNOWN_TAGS = (
    ThinkTags("<think>", "</think>"),
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<|channel>thought", "<channel|>"),  # Gemma 4
    # GPT-OSS writes messages in channels.
    ThinkTags(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
)


def think_tags(template_source: str) -> ThinkTags | None:
    """The tags around a model's thinking, judged by its chat template; None without any."""
    for tags in _KNOWN_TAGS:
        if tags.start in template_source or tags.end in template_source:
            return tags
    return None


def opens_thinking(prompt_text: str, tags: ThinkTags) -> bool:
    """Whether a rendered prompt ends inside the thinking part, after the start tag.

    A start tag further up is no sign of it: a user may have written one.
    """
    return prompt_text.rstrip().endswith(tags.start)
