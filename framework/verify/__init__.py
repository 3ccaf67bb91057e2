"""The oracle: any mix of any model held against a plain torch loop in one process (`python -m framework verify`)."""
