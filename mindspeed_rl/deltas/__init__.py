"""The weight sync in which a piece travels as the words of it that changed."""
