"""The cache server and its clients: the protocol, the transports, and both ends of every request."""
