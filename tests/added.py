"""Builds requests as a front end does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinphase.engine.process.messages import Add
from twinphase.phases.record import RequestRecord
from twinphase.request import SamplingParams


def greedy(max_tokens: int | None, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **others)


def make_add(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    salt: str | None = None,
    **fields: Any,
) -> Add:
    record = RequestRecord.arrived(request_id, 0.0)
    record.cache_salt = salt
    record.tokenized(len(prompt), 0.0)
    return Add(record, list(prompt), params, **fields)
