"""The lab's experiments, one claim a file, in the order in which a newcomer should meet them."""
