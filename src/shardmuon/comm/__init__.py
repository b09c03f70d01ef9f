"""Communication between ranks: process groups, exchanges of tensors and short messages, discovery of connected ranks,
and votes in which ranks report errors."""
