"""Compares client and trace on servers of every kind, and adds a known delay to each stage. Needs `.venv-servers`."""
