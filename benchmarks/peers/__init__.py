"""The engines twinphase is compared with: how they are installed, driven and reported.

For: `benchmarks/versus_peers.py`. Not for: importing from twinphase, nor from an adapter, each of which runs as a
script in an environment of its own and sees only `protocol.py` beside it.
"""
