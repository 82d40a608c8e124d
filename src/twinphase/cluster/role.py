"""The role of a worker: prefill, decode, or both."""

from __future__ import annotations

from typing import Literal

Role = Literal["both", "prefill", "decode"]
