"""Pushes dashboards and alert rules to Grafana, pulls and compares them."""
