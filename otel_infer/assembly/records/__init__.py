"""Records as plain data: what assembly concludes and everything after it reads."""
