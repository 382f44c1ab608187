"""The live request span in the server, its ids and its propagation."""
