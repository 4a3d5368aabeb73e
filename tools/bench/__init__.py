"""Benchmarks that compare this project with a baseline, in seconds, bytes and lower bounds."""
