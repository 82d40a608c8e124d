"""The tags between which a model thinks before it answers, as its chat template shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkTags:
    """The texts around a model's thinking.

    Attributes:
        start, end: stand before and behind it.
        without: what an answer begins with that was given without thinking; nothing for most
            models.
    """

    start: str
    end: str
    without: str = ""


_KNOWN_TAGS = (
    ThinkTags("<think>", "</think>"),
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("[THINK]", "[/THINK]"),
    # GPT-OSS writes messages in channels.
    ThinkTags(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
)


def think_tags(template_source: str) -> ThinkTags | None:
    """The tags a model thinks between, judged by its chat template; None for a model that does not think."""
    return next(
        (
            tags
            for tags in _KNOWN_TAGS
            if tags.start in template_source or tags.end in template_source
        ),
        None,
    )


def opens_thinking(prompt_text: str, tags: ThinkTags) -> bool:
    """Whether a rendered prompt ends inside the thinking part, so that the model does not write the start tag itself.

    A start tag further up is no sign of it: a user may have written one.
    """
    return prompt_text.rstrip().endswith(tags.start)
