"""Checks that flags fit each other, before anything is loaded."""
