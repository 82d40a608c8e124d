"""The conversation on a terminal that `twinphase run MODEL` begins without a prompt."""
