"""The first hour of a new user, from a clone to a kill -9; see `__main__`."""
