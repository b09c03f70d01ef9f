"""One step: validate, vote, commit."""
