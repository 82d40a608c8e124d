"""What a worker does of a request: both halves, or one of them."""

from __future__ import annotations

from typing import Literal

Role = Literal["both", "prefill", "decode"]
