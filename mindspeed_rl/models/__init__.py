"""Model families: architecture numbers and one weight table each."""
