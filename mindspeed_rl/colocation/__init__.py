"""Who is on the shared devices when: trainer or engine, and what leaves for the other."""
