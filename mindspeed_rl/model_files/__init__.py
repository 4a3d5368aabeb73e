"""Hugging Face model files that many ranks write, or read, together."""
