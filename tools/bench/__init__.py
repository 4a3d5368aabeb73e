"""Measurements of the product against the ways of its peers; nothing here is imported by it."""
