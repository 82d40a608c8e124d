"""The lab's experiments, one claim per file, ordered for newcomers."""
