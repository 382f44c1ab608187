"""Pictures of the dashboards without a Grafana: every panel asked of a Prometheus, and drawn as SVG. A preview, not Grafana."""
