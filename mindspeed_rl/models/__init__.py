"""Architecture numbers and weight tables of model families."""
