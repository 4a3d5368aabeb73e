"""Jobs that go on with fewer nodes."""
