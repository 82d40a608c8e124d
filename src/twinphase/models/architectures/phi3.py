"""Phi-3 and Phi-4-mini (Abdin et al., 2024): fused matrices, LongRoPE, and optional windows."""

from twinphase.blueprint import Blueprint
from twinphase.models.config import Config
from twinphase.models.family import llama_like

HF = {"phi3": "phi3"}


def describe(config: Config) -> Blueprint:
    return llama_like(config, fused_qkv=True, fused_gate_up=True, windowed=lambda layer: True)
