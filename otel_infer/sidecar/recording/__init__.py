"""The flight recorder: the last two minutes of facts, held by the sidecar, written as a tape when somebody asks."""
