"""The servers that are measured, written as their users write them."""
