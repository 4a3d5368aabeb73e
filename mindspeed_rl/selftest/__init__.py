"""Proofs that users run on their own ranks."""
