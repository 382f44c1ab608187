"""Builds dashboards and alert rules, and manages them in Grafana."""
