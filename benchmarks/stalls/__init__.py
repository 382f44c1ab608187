"""Injects stalls into a server at random lines, and checks which function the samples of late threads name."""
