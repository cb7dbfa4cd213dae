"""Constructs that fail today, with what is observed; a row that passes must leave this table."""

KNOWN_FAILURES: dict[str, str] = {}
