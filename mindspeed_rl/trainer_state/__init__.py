"""What of the trained models is saved and loaded again."""
