"""Defines records: the plain data that assembly concludes and later stages read."""
