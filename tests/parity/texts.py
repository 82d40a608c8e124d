"""Twenty varied texts of 50 to 2,000 tokens, from Python itself and written here."""

from __future__ import annotations

import inspect
import json

_LANGUAGES = """\
Der Fluß überquert die Grenze, und die Züge fahren über die Brücke; niemand weiß, wann der \
nächste kommt.
L'été dernier, nous avons traversé la forêt à pied : « Où êtes-vous ? » demandait la voix \
derrière les arbres.
El niño comió piñas mañana tras mañana; ¿quién le dirá que el año ya terminó? ¡Qué vergüenza!
Ночью шёл снег, и к утру весь город стал белым; только река оставалась чёрной и шумной.
昨日の夜、雨が静かに降り続いて、朝になると庭の石はみな濡れて光っていた。
机器学习模型先读入整个提示，然后一个词一个词地写出回答。
أشرقت الشمس فوق المدينة القديمة، وبدأ الباعة يفتحون أبواب دكاكينهم.
오늘 아침에는 바람이 불어서 나뭇잎이 모두 떨어졌다.
"""
_EMOJI = (
    "Release notes 🚀: faster prefill ⚡, fewer bugs 🐛→🦋, and a new theme 🌈✨. "
    "Thanks to everyone 👩‍💻👨🏽‍🔬🧑🏿‍🚀 who "
    "helped! Flags 🇩🇪🇯🇵🇧🇷, keycaps 1️⃣2️⃣3️⃣, hearts ❤️🧡💛💚💙💜, maths ∑∫√∞≠≤≥, arrows ⇒⇐⇔, box "
    "┌─┐│└┘. "
    "Zero-width​joiners, combining é and ñ, and a tab\tor two.\n"
)
_STORY = """\
The lighthouse keeper had not spoken to anyone since October. Every evening he climbed the \
hundred and twelve steps,
trimmed the wick, wound the clockwork, and watched the beam go out over the water and come back \
with nothing. In
January a small boat put in at the landing. Its owner, a woman with a red scarf and a box of \
oranges, asked whether the
island had a name. He thought about it for longer than he should have. "It has a number," he \
said. She laughed, and
gave him an orange, and by the time the tide turned they had agreed that a number would not do. \
They tried several
names on the way down to the boat; none of them was quite right, but the trying was the best part \
of his winter.
"""
_CHAT = (
    "<|im_start|>user\nList three reasons why the sky looks blue at noon and red in the "
    "evening.<|im_end|>\n"
    "<|im_start|>assistant\n1. Air scatters short waves more than long ones.\n2. At noon the "
    "light's path through the "
    "air is short, so only blue is scattered towards you.\n3. In the evening the path is long: "
    "the blue has been lost "
    "on the way, and red is what is left.<|im_end|>\n"
)
_SQL = """\
SELECT customer.name, COUNT(*) AS orders, SUM(line.price * line.quantity) AS total
FROM customer JOIN purchase ON purchase.customer_id = customer.id JOIN line ON line.purchase_id = \
purchase.id
WHERE purchase.placed_at >= '2024-01-01' AND customer.country IN ('DE', 'FR', 'BR')
GROUP BY customer.name HAVING COUNT(*) > 3 ORDER BY total DESC LIMIT 20;
"""


def _numbers() -> str:
    rows = [f"{n:4d} {n * n:8d} {n**0.5:10.6f} {1 / n:.3e} {n:#06x}" for n in range(1, 13)]
    return "   n      n^2    sqrt(n)       1/n    hex\n" + "\n".join(rows)


def _json() -> str:
    record = {
        "id": 7,
        "name": "sensor",
        "tags": ["a", "b"],
        "on": True,
        "value": None,
        "at": {"x": 0.25, "y": -1e-3},
    }
    return json.dumps([{**record, "id": n, "name": f"sensor-{n}"} for n in range(6)], indent=2)


def _zen() -> str:
    import codecs

    with open(inspect.__file__.replace("inspect.py", "this.py"), encoding="utf-8") as file:
        source = file.read()
    return codecs.decode(source.split('"""')[1], "rot13")


def _source(module: str, characters: int) -> str:
    return inspect.getsource(__import__(module))[:characters]


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return topics


def _texts() -> dict[str, str]:
    topics = _topics()
    docs = "\n".join(topics[name] for name in ("class", "for", "with", "try", "assert"))
    return {
        "story": _STORY,
        "story in capitals": _STORY.upper(),
        "zen": _zen(),
        "docs: strings": topics["strings"][:1500],
        "docs: integers": topics["integers"][:1200],
        "docs: statements": docs[:8500],
        "docs: formats": topics["formatstrings"][:2500],
        "license": _LICENSE,
        "code: heapq": _source("heapq", 1800),
        "code: textwrap": _source("textwrap", 2000),
        "code: bisect": _source("bisect", 1500),
        "code: queue": _source("queue", 2500),
        "json": _json(),
        "numbers": _numbers(),
        "sql": _SQL,
        "languages": _LANGUAGES,
        "emoji": _EMOJI,
        "chat": _CHAT,
        "repeated": "the same words again and again, " * 40,
        "random letters": " ".join(f"{(n * 2654435761) % 2**32:x}" for n in range(1, 40)),
    }


_LICENSE = """
Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except \
in compliance with the
License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0. \
Unless required by
applicable law or agreed to in writing, software distributed under the License is distributed on \
an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the \
specific language
governing permissions and limitations under the License.
"""
TEXTS = _texts()
