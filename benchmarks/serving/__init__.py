"""Subjects of `benchmarks/server.py`: `OPTIONS` of the command line; `run` gives a section and raw values."""
