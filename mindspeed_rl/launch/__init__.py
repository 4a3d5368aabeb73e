"""Starts the ranks of a job, watches them and tells why a job failed."""
