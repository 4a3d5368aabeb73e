"""Self-tests that users run on their own ranks."""
