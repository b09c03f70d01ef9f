"""Words between hosts: who belongs together, and the vote in which ranks tell each other what is wrong."""
