"""Loaders of prompts and of supervised examples, and a sampler that can be resumed."""
