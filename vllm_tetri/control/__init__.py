"""The control channel: ZeroMQ between routers and instances."""
