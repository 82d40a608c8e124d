"""The live page of a server in a browser, and what a person does with it."""

from __future__ import annotations

import json
from typing import Any

import httpx
from tests.bench.browser import Browser

KEYS = ("alice", "bob")
# With a small budget a prompt has several chunks, and three seats make the fourth request wait.
FLAGS = ("--max-num-batched-tokens", "32", "--max-num-seqs", "3", "--max-queued-requests", "2")
ANSWERED = "twinphase.chat.running === null && !!twinphase.chat.views.at(-1)?.finished"
# A random model ends its answers at once, and writes what is no text.
WITH_FIELDS = """(fields) => {
  const send = globalThis.fetch;
  globalThis.fetch = (path, options) => {
    if (!options?.body) return send(path, options);
    const body = { ...fields, ...JSON.parse(options.body) };
    if (body.response_format) delete body.ignore_eos;
    return send(path, { ...options, body: JSON.stringify(body) });
  };
}"""


class Page:
    """The page of a server, and what a person does with it."""

    def __init__(self, browser: Browser, url: str, key: str = "") -> None:
        self.browser = browser
        self.url = url
        self.key = key
        self.fields: dict[str, object] = {"ignore_eos": True}  # added to every chat

    def open(self, view: str = "chat", ready: str = "twinphase.engine.hello !== null") -> None:
        if self.key:  # as this tab keeps it
            self.browser.open(f"{self.url}/page/icon.svg", "true")
            self.value(f"sessionStorage.setItem('twinphase-key', {self.key!r})")
        self.browser.open(f"{self.url}/#{view}", f"globalThis.twinphase && {ready}")
        self.value(f"({WITH_FIELDS})({json.dumps(self.fields)})")

    def see(self, expression: str) -> None:
        self.browser.wait(expression)

    def value(self, expression: str) -> Any:
        return self.browser.evaluate(expression)

    def text(self, selector: str) -> str:
        return self.value(f"document.querySelector({selector!r}).innerText")

    def reads(self, selector: str, words: str) -> None:
        """Wait until an element has these words."""
        self.see(f"document.querySelector({selector!r})?.innerText.includes({words!r})")

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({selector!r}).click()")

    def set(self, **settings: object) -> None:
        """Settings of the chat, by the first words of their labels."""
        self.click("#settings")
        for name, value in settings.items():
            label = name.replace("_", " ")
            self.value(
                "(() => { const input = [...document.querySelectorAll('#panel label')]"
                f".find((one) => one.firstChild.textContent.startsWith({label!r})).lastChild;"
                f"input.value = {str(value)!r}; input.oninput(); }})()"
            )
        self.click("#settings")

    def ask(self, question: str) -> None:
        """Type a question and press Enter."""
        self.value("document.getElementById('prompt').focus()")
        self.browser.call("Input.insertText", text=question)
        self.browser.press("Enter", "\r")

    def ends(self) -> None:
        self.see(ANSWERED)


def words_bias(served: Any) -> dict[str, int]:
    """A bias to tokens that are words, so that a random model writes text."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    found = {}
    for word in (" the", " world", " and"):
        body = {"prompt": word, "add_special_tokens": False}
        reply = httpx.post(f"{served.url}/tokenize", json=body, headers=headers)
        found[str(reply.json()["tokens"][0])] = 20
    return found


def get(served: Any, path: str) -> Any:
    reply = httpx.get(served.url + path, headers={"Authorization": f"Bearer {KEYS[0]}"})
    assert reply.status_code == 200
    return reply.json()


def complete(served: Any, key: str, prompt: str, max_tokens: int) -> int:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{served.url}/v1/completions", json=body, headers=headers, timeout=60
    ).status_code
