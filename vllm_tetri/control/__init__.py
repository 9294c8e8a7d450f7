"""The control channel: the only layer that knows ZeroMQ."""
