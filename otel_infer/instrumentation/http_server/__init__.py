"""Shared by the entrances of all kinds of HTTP servers: the parent of a request, its outcome, its names, its wait in the socket."""
