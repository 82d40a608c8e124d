"""The tags around a model's thinking, found in its chat template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkTags:
    """The texts around a model's thinking.

    Attributes:
        start, end: texts before and after the thinking.
        without: start of an answer without thinking; empty for most models.
    """

    start: str
    end: str
    without: str = ""


_KNOWN_TAGS = (
    ThinkTags("<think>", "</think>"),
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<|channel>thought", "<channel|>"),  # This is Gemma 4's format.
    # GPT-OSS writes messages in channels.
    ThinkTags(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
)


def think_tags(template_source: str) -> ThinkTags | None:
    """The tags around a model's thinking, judged by its chat template; None if there are none."""
    for tags in _KNOWN_TAGS:
        if tags.start in template_source or tags.end in template_source:
            return tags
    return None


def opens_thinking(prompt_text: str, tags: ThinkTags) -> bool:
    """Whether a rendered prompt ends inside the thinking part, after the start tag.

    An earlier start tag does not count, because a user may have written it.
    """
    return prompt_text.rstrip().endswith(tags.start)
