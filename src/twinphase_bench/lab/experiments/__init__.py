"""The lab's experiments, one claim per file, in the order that suits a newcomer."""
