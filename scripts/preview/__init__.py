"""Pictures of the dashboards without Grafana: each panel is queried from a Prometheus and drawn with matplotlib."""
