"""Pushes dashboards and alert rules to Grafana, pulls them, and compares them."""
