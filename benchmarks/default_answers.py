"""How often a served model answers a question as expected, with the server's own sampling values.

    python benchmarks/default_answers.py http://127.0.0.1:8000

Each answer has a fixed seed, so that two runs of one version print the same. The same question is
asked with an empty system message too, because chat templates may put one of their own in front.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

TIMEOUT_SECONDS = 600.0


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="The server, without a path.")
    parser.add_argument("--question", default="What is the capital of France?")
    parser.add_argument("--expected", default="Paris", help="What a right answer names.")
    parser.add_argument("--answers", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=200)
    given = parser.parse_args()
    user = {"role": "user", "content": given.question}
    empty = {"role": "system", "content": ""}
    for name, messages in (("as it is", [user]), ("empty system message", [empty, user])):
        texts = []
        for seed in range(given.answers):
            asked = {"messages": messages, "seed": seed, "max_tokens": given.max_tokens}
            reply = post(f"{given.url}/v1/chat/completions", asked)
            texts.append(reply["choices"][0]["message"]["content"])
        right = sum(given.expected in text for text in texts)
        print(f"{name}: {right} of {given.answers} name {given.expected}")
        print(f"  the first: {texts[0][:100]!r}")


if __name__ == "__main__":
    main()
