"""Reads the interfaces of other packages from their sources, without importing them."""
