"""Chat templates for models without one, chosen by the control tokens of their vocabulary.

The vocabulary of a base model also has its family's chat tokens. If there are none, a conversation
is rendered as plain text, which the model continues.
"""

from __future__ import annotations

from collections.abc import Callable

# llama.cpp uses this for a file without a template.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The contents are joined, and a base model continues them.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)


def _turns(before: str, between: str, after: str, answer: str, *, begin: bool = True) -> str:
    """A template whose turns are `before` role `between` content `after`."""
    return (
        ("{{ bos_token }}" if begin else "") + "{% for message in messages %}"
        f"{{{{ '{before}' + message['role'] + '{between}' + message['content'] + '{after}' }}}}"
        "{% endfor %}{% if add_generation_prompt %}"
        f"{{{{ '{answer}' }}}}{{% endif %}}"
    )


# Gemma has no system turn, so the system message is put before the user's first message.
_GEMMA = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.system = message['content'] + '\\n\\n' %}"
    "{% else %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else "
    "message['role']) + '\\n' + ns.system + message['content'] + '<end_of_turn>\\n' }}"
    "{% set ns.system = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# An answer without thinking follows an empty thought.
_GEMMA4 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn>' + ('model' if message['role'] == "
    "'assistant' else message['role']) + '\\n' + message['content'] + '<turn|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n<|channel>thought\\n<channel|>' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.system = message['content'] + '\\n\\n' %}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ '[INST]' + ns.system + message['content'] + '[/INST]' }}"
    "{% set ns.system = '' %}{% endif %}{% endfor %}"
)
# The control tokens that each template needs; the first entry with all its tokens present is used.
_FAMILIES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("ChatML", ("<|im_start|>", "<|im_end|>"), CHATML),
    ("Gemma", ("<start_of_turn>", "<end_of_turn>"), _GEMMA),
    ("Gemma 4", ("<|turn>", "<turn|>"), _GEMMA4),
    (
        "Llama 3",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        _turns(
            "<|start_header_id|>",
            "<|end_header_id|>\\n\\n",
            "<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
        ),
    ),
    (
        "Granite",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        _turns(
            "<|start_of_role|>",
            "<|end_of_role|>",
            "<|end_of_text|>\\n",
            "<|start_of_role|>assistant<|end_of_role|>",
            begin=False,
        ),
    ),
    (
        "Phi-3",
        ("<|user|>", "<|assistant|>", "<|end|>"),
        _turns("<|", "|>\\n", "<|end|>\\n", "<|assistant|>\\n", begin=False),
    ),
    ("Mistral", ("[INST]", "[/INST]"), _MISTRAL),
)


def family_template(has_control_token: Callable[[str], bool]) -> tuple[str, str | None]:
    """The template for a vocabulary and the name of its family; otherwise `PLAIN` and None."""
    for name, tokens, source in _FAMILIES:
        if all(map(has_control_token, tokens)):
            return source, name
    return PLAIN, None
