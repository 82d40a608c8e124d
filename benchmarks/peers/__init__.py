"""The engines twinphase is compared with by `versus_peers.py`: how they are installed, driven and reported.

Each adapter runs as a script in an environment of its own and sees only `protocol.py` beside it.
"""
