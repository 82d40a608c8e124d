"""The engines that `versus_peers.py` compares: how they are installed, driven and reported.

Each adapter runs as a script in an environment of its own and sees only `protocol.py` beside it.
"""
