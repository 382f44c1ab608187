"""Alert rules for objectives and for causes, built from the metric names that the code emits."""
