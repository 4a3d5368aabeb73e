"""A step of an earlier run again, and where its numbers first differ."""
