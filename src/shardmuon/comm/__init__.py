"""Communication between ranks: creating process groups, exchanging tensors and short messages, finding all ranks that
are connected by parameters or process groups, and voting on whether all ranks can make a collective call."""
