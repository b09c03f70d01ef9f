"""One optimizer step: validate, vote, commit."""
