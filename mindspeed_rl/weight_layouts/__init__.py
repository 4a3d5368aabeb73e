"""Layouts: which part of which tensor each rank of a trainer or an engine, or each file, holds."""
