"""Subjects of `benchmarks/server.py`: `OPTIONS` of each, and `run`: a section and raw values."""
