"""One question a file: `SUBJECT` names it, `add_arguments` adds its options, `run` answers it with a `Report`.

For: `many_requests.py`. What they share is in `loads.py`.
"""
