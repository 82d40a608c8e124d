"""The interactive chat that `twinphase run MODEL` starts without a prompt."""
